"""What the clients' tests ask, and what is to be heard."""

import json
from typing import Any

STORY = "Tell me a story."
ORDER = "Hi, can I get a large latte with oat milk, please?"  # the shipped model looks into the menu
MENU: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_menu_items",
        "description": "Get menu items.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# For the parrot.
TEXT = "naïve 😀: one two three"
CALLS = [{"city": "Paris"}, {"city": "Köln"}]
CALLING = "".join(
    f"<tool_call>{json.dumps({'name': 'get_weather', 'arguments': a}, ensure_ascii=False)}</tool_call>" for a in CALLS
)
THINKING = "<think>\nfive six\n</think>\n\nhello there"


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]
