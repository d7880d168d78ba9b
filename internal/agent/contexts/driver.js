// The JavaScript side of a context; the protocol is that of docs/contexts.md, on descriptor 3. Works with node 16 and newer.
//
// Code runs as a script in node's own realm, as at node's prompt: what it declares stays, and const, let and class can be
// declared again by the code that comes next. That takes no parser: a scanner finds the declarations at top level, and
// what they say is kept by turning them into var, or into assignments where the code awaits and so has to become the body
// of a function.
(function (require, importModule) {
  "use strict";
  const fs = require("fs");
  const vm = require("vm");
  const util = require("util");
  const { createRequire } = require("module");

  const CONTROL = 3;
  const MAX_TEXT = 1 << 20;
  const MAX_RESULT = 8 << 20;
  const { stringify, parse } = JSON;
  const stdout = process.stdout, stderr = process.stderr;
  const exit = process.exit.bind(process);

  let busy = false; // an evaluation runs, so the agent listens
  let count = 0;
  let fail = null; // ends what the running evaluation awaits
  let waiting = []; // results that were shown while none ran
  let held = Buffer.alloc(0);

  // --- the channel ---------------------------------------------------------------------------------------------------

  function send(message) {
    const text = Buffer.from(stringify(message));
    const data = Buffer.alloc(4 + text.length);
    data.writeUInt32BE(text.length);
    text.copy(data, 4);
    for (let n = 0; n < data.length; ) n += fs.writeSync(CONTROL, data, n);
  }

  // take removes the first message from what has been received, if it is complete.
  function take() {
    if (held.length < 4) return null;
    const end = 4 + held.readUInt32BE();
    if (held.length < end) return null;
    const message = parse(held.subarray(4, end).toString());
    held = held.subarray(end);
    return message;
  }

  const room = Buffer.alloc(1 << 16);

  function receiveSync() {
    for (;;) {
      const message = take();
      if (message) return message;
      const n = fs.readSync(CONTROL, room);
      if (n === 0) exit(0);
      held = Buffer.concat([held, room.subarray(0, n)]);
    }
  }

  function receive(use) {
    const message = take();
    if (message) return void setImmediate(use, message);
    fs.read(CONTROL, room, 0, room.length, null, (error, n) => {
      if (error || n === 0) exit(0);
      held = Buffer.concat([held, room.subarray(0, n)]);
      receive(use);
    });
  }

  // sync returns when what was printed and sent so far has arrived. Between evaluations nobody answers.
  function sync(message) {
    if (!busy) return;
    send(message || { id: 0, sync: true });
    while (receiveSync().op !== "ack");
  }

  // Standard error comes in order with standard output, though they are two pipes: who writes to it waits.
  const write = stderr.write;
  stderr.write = function (...args) {
    sync();
    const done = write.apply(stderr, args);
    sync();
    return done;
  };

  // --- results -------------------------------------------------------------------------------------------------------

  const NAMES = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "application/json": "json",
    "application/javascript": "javascript",
  };
  const DISPLAY = [Symbol.for("Jupyter.display"), Symbol.for("forkd.display")];

  function clip(text) {
    return text.length > MAX_TEXT ? `${text.slice(0, MAX_TEXT)}… [${text.length - MAX_TEXT} more characters cut]` : text;
  }

  function inspect(value) {
    return clip(util.inspect(value, { ...util.inspect.defaultOptions, showProxy: true, colors: false }));
  }

  // bundle is what a value shows itself as, by MIME type, or null.
  function bundle(value) {
    if (value === null || (typeof value !== "object" && typeof value !== "function")) return null;
    for (const symbol of DISPLAY) if (typeof value[symbol] === "function") return value[symbol]();
    return null;
  }

  function show(data, isMain) {
    const result = { is_main_result: isMain };
    let left = MAX_RESULT;
    for (const [kind, value] of Object.entries(data)) {
      if (value === null || value === undefined) continue;
      const name = NAMES[kind];
      const asIs = name === "json" || !name;
      const item = asIs ? value : value instanceof Uint8Array ? Buffer.from(value).toString("base64") : String(value);
      const size = asIs ? stringify(item).length : item.length;
      if (size > left) {
        (result.omitted ||= []).push({ format: name || kind, bytes: size, limit: MAX_RESULT });
        result.text = `${result.text ? result.text + "\n" : ""}[${name || kind} of ${(size / 2 ** 20).toFixed(1)} MiB left out: a result holds ${MAX_RESULT >> 20} MiB]`;
        continue;
      }
      left -= size;
      if (!name) (result.extra ||= {})[kind] = item;
      else if (name === "text" && result.text) result.text = item + "\n" + result.text;
      else result[name] = item;
    }
    const message = { id: 0, result, sync: true };
    if (busy) sync(message);
    else if (waiting.length < 64) waiting.push(message);
  }

  function display(value, options) {
    const data = options && options.raw ? value : bundle(value);
    if (data && typeof data.then === "function") return data.then((d) => show(d, false));
    show(data || { "text/plain": inspect(value) }, false);
  }

  // --- code ----------------------------------------------------------------------------------------------------------

  // Keywords after which a slash begins a regular expression, and an expression goes on in the next line.
  const OPERATORS = new Set(
    "await case delete do else extends in instanceof new of return throw typeof void yield default".split(" "));
  const space = /[\s\u2028\u2029\ufeff]/u;
  const wordStart = /[\p{ID_Start}$_\\#]/u;
  const word = /[\p{ID_Continue}$\u200c\u200d\\#]/u;

  // scan finds the tokens at top level: {text, start, end, line: it is the first of its line}. What is inside of brackets
  // is one token, from bracket to bracket, with nested: all words in it.
  function scan(code) {
    const tokens = [];
    const stack = []; // of open brackets: {start, open, template}
    let words = []; // of the outermost open bracket
    let previous = null; // the token before, at any depth
    let line = true;
    let i = 0;
    const push = (text, start) => {
      previous = text;
      if (stack.length === 0) tokens.push({ text, start, end: i, line });
      else words.push(text);
      line = false;
    };
    // An operand before a slash makes it a division. After ) it may be either; a condition is rarely followed by a
    // regular expression.
    const operand = () =>
      previous !== null && (previous === ")" || previous === "]" || previous === "}" || /^["'`\d]/.test(previous) ||
        (wordStart.test(previous) && !OPERATORS.has(previous)));
    const template = () => {
      // From behind ` or the } of a part: to the next ${ or the end.
      for (; i < code.length; i++) {
        if (code[i] === "\\") i++;
        else if (code[i] === "`") return void i++;
        else if (code[i] === "$" && code[i + 1] === "{") {
          i += 2;
          return true;
        }
      }
    };
    while (i < code.length) {
      const start = i;
      const c = code[i];
      if (space.test(c)) {
        if (c === "\n" || c === "\u2028" || c === "\u2029" || c === "\r") line = true;
        i++;
      } else if (c === "/" && code[i + 1] === "/" || (c === "#" && code[i + 1] === "!" && i === 0)) {
        while (i < code.length && code[i] !== "\n") i++;
      } else if (c === "/" && code[i + 1] === "*") {
        const end = code.indexOf("*/", i + 2);
        i = end < 0 ? code.length : end + 2;
        if (code.slice(start, i).includes("\n")) line = true;
      } else if (c === '"' || c === "'") {
        for (i++; i < code.length && code[i] !== c && code[i] !== "\n"; i++) if (code[i] === "\\") i++;
        i++;
        push(code.slice(start, i), start);
      } else if (c === "`") {
        i++;
        if (template()) {
          if (stack.length === 0) words = [];
          stack.push({ start, open: "`", template: true, line });
          previous = "{";
        } else push("`", start);
      } else if (c === "/" && !operand()) {
        let inClass = false;
        for (i++; i < code.length && code[i] !== "\n" && (code[i] !== "/" || inClass); i++) {
          if (code[i] === "\\") i++;
          else if (code[i] === "[") inClass = true;
          else if (code[i] === "]") inClass = false;
        }
        i++;
        while (i < code.length && word.test(code[i])) i++;
        push('"re"', start); // an operand
      } else if (c === "(" || c === "[" || c === "{") {
        if (stack.length === 0) words = [];
        stack.push({ start, open: c, line });
        previous = c;
        line = false;
        i++;
      } else if (c === ")" || c === "]" || c === "}") {
        i++;
        const opened = stack.pop();
        if (!opened) return null; // the compiler will say it
        if (opened.template && template()) {
          stack.push(opened);
          previous = "{";
          continue;
        }
        previous = opened.template ? "`" : c;
        if (stack.length === 0) {
          tokens.push({ text: opened.open, close: c, start: opened.start, end: i, line: opened.line, nested: words });
          line = false;
        }
      } else if (wordStart.test(c) || c > "\uffff" || (c >= "\ud800" && c <= "\udbff")) {
        while (i < code.length && (word.test(code[i]) || (code[i] >= "\ud800" && code[i] <= "\udfff"))) i++;
        if (i === start) i++;
        push(code.slice(start, i), start);
      } else if (c >= "0" && c <= "9") {
        while (i < code.length && (word.test(code[i]) || code[i] === ".")) i++;
        push(code.slice(start, i), start);
      } else {
        i++;
        if (c === "=" && code[i] === ">") i++;
        else if ((c === "+" || c === "-") && code[i] === c) i++;
        push(code.slice(start, i), start);
      }
    }
    return stack.length === 0 ? tokens : null;
  }

  // continues says whether a token at the beginning of a line goes on with what is before it.
  function continues(before, token) {
    const t = token.text;
    if (OPERATORS.has(before.text) || /^[-+*/%&|^!~<>=?:,.]+$/.test(before.text) && before.text !== "++" && before.text !== "--") return true;
    if (t === "in" || t === "instanceof" || t === "of") return true;
    return /^[-+*/%&|^<>=?:,.;]/.test(t) && t !== "++" && t !== "--" || (!token.close ? false : t !== "{");
  }

  // statement says whether a statement can begin at a token.
  function begins(tokens, k) {
    if (k === 0) return true;
    const before = tokens[k - 1];
    if (before.text === ";") return true;
    if (before.close === "}" && tokens[k].text !== "." && tokens[k].text !== "=") return true;
    return tokens[k].line && !continues(before, tokens[k]);
  }

  // rewrite makes code of which declarations stay. In a function: they become assignments to what is global.
  function rewrite(code, tokens, inFunction) {
    const edits = []; // {start, end, text}
    const names = []; // of functions, and of variables without a value
    const replace = (start, end, text) => edits.push({ start, end, text });
    for (let k = 0; k < tokens.length; k++) {
      const t = tokens[k], next = tokens[k + 1];
      if (!begins(tokens, k) || !next) continue;
      if (t.text === "export" && /^(const|let|var|class|function|async|default)$/.test(next.text)) {
        replace(t.start, next.text === "default" ? next.end : t.end, "");
        tokens.splice(k, next.text === "default" ? 2 : 1);
        if (tokens[k]) tokens[k].line = true;
        k--;
        continue;
      }
      const binding = next.close || wordStart.test(next.text);
      if ((t.text === "const" || t.text === "let" || t.text === "var") && binding && next.text !== "in" && next.text !== "instanceof" && next.text !== "of") {
        if (!inFunction) {
          if (t.text !== "var") replace(t.start, t.end, t.text === "const" ? "var  " : "var");
        } else {
          replace(t.start, t.end, t.text === "const" ? ";0,  " : ";0,");
          for (let j = k + 1; ; ) {
            if (!tokens[j].close && !(tokens[j + 1] && tokens[j + 1].text === "=")) names.push({ name: tokens[j].text, empty: true });
            while (tokens[j + 1] && tokens[j + 1].text !== "," && tokens[j + 1].text !== ";" && !(tokens[j + 1].line && begins(tokens, j + 1))) j++;
            if (!tokens[j + 1] || tokens[j + 1].text !== "," || !tokens[j + 2]) break;
            j += 2;
          }
        }
      } else if (t.text === "class" && wordStart.test(next.text) && next.text !== "extends") {
        replace(t.start, t.start, inFunction ? `;${next.text}=` : `var ${next.text}=`);
        let j = k + 1;
        while (tokens[j] && !(tokens[j].text === "{" && tokens[j].close)) j++;
        if (tokens[j]) replace(tokens[j].end, tokens[j].end, ";");
      } else if (inFunction && (t.text === "function" || (t.text === "async" && next.text === "function"))) {
        const rest = tokens.slice(k, k + 4).map((x) => x.text).filter((x) => x !== "async" && x !== "function" && x !== "*");
        if (rest[0] && wordStart.test(rest[0])) names.push({ name: rest[0] });
      } else if (t.text === "import" && next.text !== "(" && next.text !== ".") {
        importStatement(code, tokens, k, replace);
      }
    }
    // import() at any depth: a script's own would need a loader of its own.
    for (const m of code.matchAll(/(?<![.\w$#])import(?=\s*\()/g)) {
      if (inCode(code, m.index)) replace(m.index, m.index + 6, "$import");
    }
    edits.sort((a, b) => a.start - b.start || a.end - b.end);
    let out = "", at = 0;
    for (const e of edits) {
      if (e.start < at) continue;
      out += code.slice(at, e.start) + e.text;
      at = e.end;
    }
    return { code: out + code.slice(at), names };
  }

  // inCode says whether a position is in no string or comment; roughly, for the one word that is asked for.
  function inCode(code, at) {
    const line = code.slice(code.lastIndexOf("\n", at) + 1, at);
    const quotes = line.replace(/\\./g, "");
    return !/(^|[^:])\/\//.test(quotes.replace(/(["'`]).*?\1/g, "")) && ["\"", "'", "`"].every((q) => quotes.split(q).length % 2 === 1);
  }

  function importStatement(code, tokens, k, replace) {
    let j = k + 1;
    while (tokens[j] && !/^["']/.test(tokens[j].text)) j++;
    const from = tokens[j];
    if (!from) return;
    const clause = code.slice(tokens[k].end, from.start).replace(/\bfrom\s*$/, "").trim();
    let end = from.end, how = "";
    if (tokens[j + 1] && /^(with|assert)$/.test(tokens[j + 1].text) && tokens[j + 2] && tokens[j + 2].close) {
      how = `, { ${tokens[j + 1].text}: ${code.slice(tokens[j + 2].start, tokens[j + 2].end)} }`;
      end = tokens[j + 2].end;
    }
    const parts = [];
    const all = /\*\s*as\s+([\w$\p{ID_Continue}]+)/u.exec(clause);
    const some = /\{([\s\S]*)\}/.exec(clause);
    const one = /^([\w$\p{ID_Continue}]+)/u.exec(clause);
    const promise = `(await $import(${from.text}${how}))`;
    if (one) parts.push(`default: ${one[1]}`);
    if (some) parts.push(...some[1].split(",").map((s) => s.trim().replace(/\s+as\s+/, ": ")).filter((s) => s !== ""));
    let text = clause === "" ? `;${promise}` : all ? `;0,${all[1]} = ${promise}` : `;0,{ ${parts.join(", ")} } = ${promise}`;
    if (all && one) text += `, ${one[1]} = ${all[1]}.default`;
    // As many lines as before.
    text += "\n".repeat(code.slice(tokens[k].start, end).split("\n").length - 1);
    replace(tokens[k].start, end, text + ";");
  }

  function compile(source, name, offset) {
    const options = { filename: name, columnOffset: -(offset || 0) };
    const loader = vm.constants && vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER;
    if (loader) options.importModuleDynamically = loader;
    return new vm.Script(source, options);
  }

  // inFunction makes code that awaits a function, which returns what the last expression is worth.
  function asFunction(code, name) {
    const tokens = scan(code);
    if (!tokens) return compile(`(async () => {${code}\n})`, name, 13);
    const found = rewrite(code, tokens, true);
    let prelude = "";
    for (const n of found.names) prelude += n.empty ? `if(!("${n.name}" in globalThis))globalThis.${n.name}=undefined;` : `globalThis.${n.name}=${n.name};`;
    const head = `(async () => {;${prelude}`;
    const body = found.code;
    const bodyTokens = scan(body) || [];
    const statements = /^(var|let|const|class|function|if|for|while|do|switch|try|return|throw|import|export|break|continue|debugger|with|\{|;|@)$/;
    const starts = [];
    for (let k = 0; k < bodyTokens.length; k++) {
      const t = bodyTokens[k];
      if ((k === 0 || bodyTokens[k - 1].text === ";" || bodyTokens[k - 1].close === "}" || t.line) && !statements.test(t.text) &&
        !(t.text === "async" && bodyTokens[k + 1] && bodyTokens[k + 1].text === "function")) starts.push(t.start);
    }
    for (const start of starts.slice(-64)) {
      const before = body.slice(0, start), value = body.slice(start).replace(/;\s*$/, "");
      try {
        compile(`(async () => {;${before}\n})`, name); // complete without it
        compile(`(async () => (${value}\n))`, name);
        return compile(`${head}${before}return (${value}\n)})`, name, head.length);
      } catch {
        // not where the last statement begins
      }
    }
    return compile(`${head}${body}\n})`, name, head.length);
  }

  const INTERRUPTED = "ERR_SCRIPT_EXECUTION_INTERRUPTED";

  function interrupted() {
    const error = new Error("interrupted");
    error.name = error.code = INTERRUPTED;
    return error;
  }

  async function execute(code, name) {
    let script, problem;
    const tokens = scan(code);
    const imports = tokens && tokens.some((t, k) => t.text === "import" && begins(tokens, k) && tokens[k + 1] && tokens[k + 1].text !== "(" && tokens[k + 1].text !== ".");
    if (!imports) {
      try {
        let source = tokens ? rewrite(code, tokens, false).code : code;
        // As at the prompt: what looks like an object is one.
        if (tokens && tokens.length && tokens[0].text === "{" && tokens[tokens.length - 1].text !== ";") {
          try {
            script = compile(`(${source}\n)`, name, 1);
          } catch {
            script = null;
          }
        }
        script ||= compile(source, name);
      } catch (error) {
        problem = error;
      }
    }
    if (!script && (imports || /\bawait\b/.test(code))) {
      try {
        const start = asFunction(code, name);
        const f = start.runInThisContext({ breakOnSigint: true });
        return { value: await Promise.race([f(), new Promise((_, reject) => (fail = reject))]) };
      } finally {
        fail = null;
      }
    }
    if (!script) throw problem;
    return { value: script.runInThisContext({ breakOnSigint: true }) };
  }

  // describe is an error as node prints it, without our own frames.
  function describe(error) {
    if (error instanceof Error || util.types.isNativeError(error)) {
      let value, text;
      try {
        value = String(error.message);
        text = typeof error.stack === "string" ? util.inspect(error) : `${error.name}: ${value}`;
      } catch {
        value = "<unprintable error>";
        text = value;
      }
      if (error.code === INTERRUPTED) return { name: "KeyboardInterrupt", value: "", traceback: "KeyboardInterrupt" };
      const ours = /^ {4}at .*(<forkd>|node:vm|node:internal|evalmachine|\[eval\]|vm\.js:|at new Script|Script\.runInThisContext)/;
      text = text.split("\n").filter((l) => !ours.test(l)).join("\n");
      return { name: String(error.name || "Error"), value: clip(value), traceback: clip(text) };
    }
    const text = inspect(error);
    return { name: "Uncaught", value: text, traceback: "Uncaught " + text };
  }

  async function evaluate(request) {
    const before = {};
    for (const [k, v] of Object.entries(request.env || {})) {
      before[k] = process.env[k];
      process.env[k] = v;
    }
    const reply = { id: request.id };
    busy = true;
    count++;
    for (const message of waiting.splice(0)) sync(message);
    try {
      let code = request.code;
      if (request.language === "typescript") code = stripTypes(code, { mode: "transform", sourceUrl: "" }).replace(/\n\/\/# sourceURL=.*\s*$/, "");
      const { value } = await execute(code, request.name); // wrapped: a promise is a value, too
      if (value !== undefined) {
        const data = await bundle(value);
        globalThis._ = value;
        if (data) show(data, true);
        reply.text = data && typeof data["text/plain"] === "string" ? data["text/plain"] : inspect(value);
        if (data && data["text/plain"] === undefined) delete reply.text;
      }
    } catch (error) {
      globalThis._error = error;
      reply.error = describe(error);
    }
    // What has resolved by now is reported before the end.
    await new Promise(setImmediate);
    busy = false;
    for (const [k, v] of Object.entries(before)) {
      if (v === undefined) delete process.env[k];
      else process.env[k] = v;
    }
    return reply;
  }

  // --- forks ---------------------------------------------------------------------------------------------------------

  // Math.random of the engine cannot be seeded again, so this one stands in for it: xoshiro128**.
  const state = new Uint32Array(4);
  const rotate = (x, k) => ((x << k) | (x >>> (32 - k))) >>> 0;
  function word32() {
    const result = Math.imul(rotate(Math.imul(state[1], 5), 7), 9) >>> 0;
    const t = state[1] << 9;
    state[2] ^= state[0];
    state[3] ^= state[1];
    state[1] ^= state[2];
    state[0] ^= state[3];
    state[2] ^= t;
    state[3] = rotate(state[3], 11);
    return result;
  }
  function seed(bytes) {
    for (let k = 0; k < 4; k++) state[k] = bytes.readUInt32LE(4 * k);
    if (state.every((x) => x === 0)) state[0] = 1;
  }
  const random = { random() { return ((word32() >>> 5) * 67108864 + (word32() >>> 6)) / 9007199254740992; } }.random;
  {
    const bytes = Buffer.alloc(16);
    const f = fs.openSync("/dev/urandom", "r");
    fs.readSync(f, bytes);
    fs.closeSync(f);
    seed(bytes);
  }
  Object.defineProperty(Math, "random", { value: random, writable: true, configurable: true, enumerable: false });

  function renew(request) {
    const renewed = [], failed = [];
    const why = "its seed is the siblings' until it is an hour old; what node draws from it (crypto, TLS) may be the same";
    if (!request.again) {
      for (const [k, v] of Object.entries(request.env || {})) process.env[k] = v;
      seed(Buffer.from(request.seed, "base64"));
      renewed.push("Math.random");
      if (!request.ahead) failed.push({ name: "openssl", why });
    }
    try {
      // On a clock that is hours ahead OpenSSL takes its seed for old, and the one that it takes then for one of the future
      // when the clock is right again: that comes from the kernel.
      const crypto = require("crypto");
      crypto.randomBytes(1);
      if (request.again) {
        // Node keeps 128 identifiers in store: after as many calls all in it is new.
        if (crypto.randomUUID) for (let k = 0; k < 128; k++) crypto.randomUUID();
        renewed.push("openssl", "crypto.randomUUID");
      }
    } catch (error) {
      failed.push({ name: "crypto", why: String(error) });
    }
    return { id: request.id, renewed, failed };
  }

  function facts(request) {
    if (request.search) {
      // A parent that never runs again: what a fork will need to renew is loaded and compiled, and not by every child.
      try {
        const crypto = require("crypto");
        crypto.randomBytes(1);
        if (crypto.randomUUID) for (let k = 0; k < 128; k++) crypto.randomUUID();
        word32();
        stringify(parse('{"a":[1]}'));
      } catch {
        // it will be said in the fork
      }
    }
    const found = [
      { what: "hash_seed", name: "the engine's hash tables", why: "an engine keeps its hash seed for life" },
      { what: "generator", name: "random bytes that libraries keep in store (uuid, nanoid)", why: "they are the library's own; crypto.randomUUID and crypto.randomBytes are renewed" },
    ];
    return { id: request.id, facts: found };
  }

  // --- life ----------------------------------------------------------------------------------------------------------

  process.on("SIGINT", () => fail && fail(interrupted()));
  const uncaught = (error) => stderr.write("Uncaught " + describe(error).traceback + "\n");
  process.on("uncaughtException", (error) => (fail && error && error.code === INTERRUPTED ? fail(error) : uncaught(error)));
  process.on("unhandledRejection", uncaught);

  const global = (name, value) => Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });
  global("display", display);
  global("$import", importModule);
  global("require", createRequire(process.cwd() + "/"));
  for (const name of require("module").builtinModules) {
    // As at node's prompt: fs, path and so on are there, and can be declared anew.
    if (/^[a-z_]+$/.test(name) && !(name in globalThis)) {
      Object.defineProperty(globalThis, name, {
        get: () => require(name), set: (v) => Object.defineProperty(globalThis, name, { value: v, writable: true, configurable: true, enumerable: true }),
        configurable: true, enumerable: false,
      });
    }
  }
  const stripTypes = require("module").stripTypeScriptTypes;

  async function serve(request) {
    if (request.op === "eval") send(await evaluate(request));
    else if (request.op === "renew") send(renew(request));
    else if (request.op === "facts") send(facts(request));
    receive(serve);
  }

  const ops = ["facts", "renew"];
  if (stripTypes) ops.push("typescript");
  send({ id: 0, ready: { version: process.versions.node, ops, clock: true } });
  receive(serve);
  setInterval(() => {}, 2 ** 30); // code may wait for what never comes
});
