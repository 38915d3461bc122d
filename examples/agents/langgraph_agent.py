"""An agent of LangGraph that adds numbers: a model and a calculator in turn, until the model
answers. It knows nothing of what trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition

STEPS_MAX = 20
CLIENTS: Mapping[str, Any] = {
    "http_client": openai.DefaultHttpxClient(),
    "http_async_client": openai.DefaultAsyncHttpxClient(),
}
"""For all trajectories of a process: a model without them makes its own, which takes 60 ms."""


@tool
def calculator(a: int, b: int) -> int:
    """Add two numbers, modulo 100."""
    return (a + b) % 100


def graph(model: ChatOpenAI) -> CompiledStateGraph:
    with_tools = model.bind_tools([calculator])

    async def say(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await with_tools.ainvoke(state["messages"])]}

    built = StateGraph(MessagesState)
    built.add_node("model", say)
    built.add_node("tools", ToolNode([calculator]))
    built.add_edge(START, "model")
    built.add_conditional_edges("model", tools_condition)
    built.add_edge("tools", "model")
    return built.compile()


async def run(base_url: str, api_key: str, row: Mapping[str, Any]) -> str:
    """The task scores its last answer."""
    numbers = row["numbers"]
    question = " ".join(f"n{len(numbers) - index} {number}" for index, number in enumerate(numbers))
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, **CLIENTS)
    messages = [SystemMessage("Add the numbers."), HumanMessage(question)]
    try:
        state = await graph(model).ainvoke({"messages": messages}, {"recursion_limit": STEPS_MAX})
    except GraphRecursionError:
        return "no answer"
    return str(state["messages"][-1].text)
