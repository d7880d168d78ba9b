import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Executors;

/** A small service with a state: it counts words. */
public class Main {
    private static final Map<String, Integer> words = new ConcurrentHashMap<>();

    public static void main(String[] args) throws IOException {
        var server = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress(), 8080), 0);
        server.createContext("/health", x -> answer(x, "ok"));
        server.createContext("/uuid", x -> answer(x, UUID.randomUUID().toString()));
        server.createContext("/count/", x -> {
            var word = x.getRequestURI().getPath().substring("/count/".length());
            answer(x, word + " " + words.merge(word, 1, Integer::sum) + " of " + words.size());
        });
        server.setExecutor(Executors.newFixedThreadPool(2));
        server.start();
    }

    private static void answer(HttpExchange x, String text) throws IOException {
        var body = (text + "\n").getBytes(StandardCharsets.UTF_8);
        x.sendResponseHeaders(200, body.length);
        try (var out = x.getResponseBody()) {
            out.write(body);
        }
    }
}
