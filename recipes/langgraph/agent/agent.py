"""A LangGraph agent that lives in a sandbox: it calls tools, thinks aloud and can be steered in the middle of a thought."""

import json
import queue
import random
import sqlite3
import threading
import time
import uuid

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

# What only this process has: no checkpoint of LangGraph's and no file holds it.
database = sqlite3.connect(":memory:", check_same_thread=False)


@tool
def load(path: str) -> str:
    """Load a file of orders into the database."""
    with open(path) as file:
        rows = [line.strip().split(",") for line in file]
    database.execute("CREATE TABLE orders (city, month, product, amount INTEGER)")
    database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", rows)
    return f"{len(rows)} orders"


@tool
def overview() -> str:
    """Tell how many orders there are and what they come to."""
    return json.dumps(database.execute("SELECT count(*), sum(amount) FROM orders").fetchone())


@tool
def focus(column: str) -> str:
    """Keep the orders of the best city, month or product, and delete all others."""
    if column not in ("city", "month", "product"):
        return f"there is no column {column}"
    best = f"SELECT {column} FROM orders GROUP BY 1 ORDER BY sum(amount) DESC LIMIT 1"
    (name,) = database.execute(best).fetchone()
    database.execute(f"DELETE FROM orders WHERE {column} <> ?", (name,))
    (total,) = database.execute("SELECT sum(amount) FROM orders").fetchone()
    return json.dumps([name, total])


class ScriptedModel(BaseChatModel):
    """Stands in for a model: it answers by what has been said so far, word by word. Any chat model can take its place."""

    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **options):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **options):
        chunks = list(self._stream(messages))
        whole = chunks[0].message
        for chunk in chunks[1:]:
            whole += chunk.message
        return ChatResult(
            generations=[ChatGeneration(message=AIMessage(content=whole.content, tool_calls=whole.tool_calls))]
        )

    def _stream(self, messages, stop=None, run_manager=None, **options):
        done = [m.name for m in messages if isinstance(m, ToolMessage)]
        asked = [m.content for m in messages if isinstance(m, HumanMessage)]
        if "load" not in done:
            yield self._call("load", path=asked[0].split()[-1])
        elif "overview" not in done:
            yield self._call("overview")
        elif "focus" in done:
            yield self._say(
                f"Best {asked[-1].split()[-1]}: {' with '.join(map(str, json.loads(messages[-1].content)))}."
            )
        elif len(asked) > 1:
            yield self._call("focus", column=asked[-1].split()[-1])
        else:
            yield self._say(f"Thought {uuid.uuid4()}:")
            for _ in range(100_000):  # half an hour and more: it wants to be told
                time.sleep(0.02)
                yield self._say(
                    " " + random.choice(["perhaps", "city", "or", "month", "then", "product", "but", "first"])
                )

    def _say(self, text):
        return ChatGenerationChunk(message=AIMessageChunk(content=text))

    def _call(self, name, **arguments):
        call = {"name": name, "args": json.dumps(arguments), "id": uuid.uuid4().hex, "index": 0}
        return ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[call]))


class Agent:
    """The graph, and the thread that it runs in."""

    def __init__(self, model):
        tools = [load, overview, focus]
        self._model = model.bind_tools(tools)
        self._inbox = queue.Queue()
        self._thread = None
        self._error = None
        self.calls = 0
        self.thought = ""
        graph = StateGraph(MessagesState)
        graph.add_node("think", self._think)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "think")
        graph.add_conditional_edges("think", self._next, ["think", "tools", END])
        graph.add_edge("tools", "think")
        self._graph = graph.compile(checkpointer=InMemorySaver())
        self._config = {"configurable": {"thread_id": "1"}}

    def _think(self, state):
        self.calls += 1
        self.thought = ""
        whole = None
        for chunk in self._model.stream(state["messages"]):
            whole = chunk if whole is None else whole + chunk
            self.thought += chunk.content
            if not self._inbox.empty():  # what is thought so far is kept, and what was said comes after it
                return {"messages": [AIMessage(content=self.thought), HumanMessage(content=self._inbox.get())]}
        return {"messages": [AIMessage(content=whole.content, tool_calls=whole.tool_calls)]}

    def _next(self, state):
        last = state["messages"][-1]
        if isinstance(last, HumanMessage):
            return "think"
        return "tools" if last.tool_calls else END

    def start(self, task):
        """Gives it a task; it works on it in a thread of its own."""

        def work():
            try:
                self._graph.invoke({"messages": [HumanMessage(content=task)]}, self._config)
            except Exception as error:
                self._error = repr(error)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def steer(self, text):
        """Interrupts its thought with an instruction."""
        self._inbox.put(text)

    def report(self, wait=0.0):
        """What it has come to, as JSON; waits that many seconds for its end."""
        self._thread.join(wait)
        said = self._graph.get_state(self._config).values.get("messages", [])
        tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        return json.dumps(
            {
                "messages": [[m.type, m.id, m.content] for m in said],
                "thought": self.thought,
                "calls": self.calls,
                "rows": database.execute("SELECT count(*) FROM orders").fetchone()[0] if tables else 0,
                "running": self._thread.is_alive(),
                "error": self._error,
            }
        )


agent = Agent(ScriptedModel())
