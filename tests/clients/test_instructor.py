"""instructor: answers as pydantic models; by tools that the model may call, and by JSON in the text with a second try."""

import json
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from pydantic import BaseModel, field_validator

from tests.clients.conftest import Server
from tests.clients.said import CALLING, user


class GetWeather(BaseModel):
    """Tells the weather of a city."""

    city: str


class Person(BaseModel):
    name: str
    age: int


class Adult(Person):
    @field_validator("age")
    @classmethod
    def grown(cls, age: int) -> int:
        if age < 18:
            raise ValueError("must be 18 or more")
        return age


def fenced(value: Any) -> str:
    return f"```json\n{json.dumps(value)}\n```"


def patched(server: Server, mode: str, asynchronous: bool = False) -> Any:
    import instructor

    kind = openai.AsyncOpenAI if asynchronous else openai.OpenAI
    return instructor.from_openai(
        kind(base_url=server.url, api_key="none", max_retries=0), mode=getattr(instructor.Mode, mode)
    )


def test_json_in_the_text(parrot: Server) -> None:
    person, raw = patched(parrot, "MD_JSON").chat.completions.create_with_completion(
        model="parrot", messages=user(fenced({"name": "Zoë", "age": 7})), response_model=Person, max_retries=0
    )
    assert isinstance(person, Person) and (person.name, person.age) == ("Zoë", 7)
    assert raw.id.startswith("chatcmpl-") and raw.choices[0].finish_reason == "stop" and raw.usage.total_tokens > 10


def test_an_invalid_answer_is_asked_for_again(parrot: Server) -> None:
    """The second request carries the first answer and what was wrong with it."""
    client = patched(parrot, "MD_JSON")
    sent: list[Any] = []
    client.on("completion:kwargs", lambda *args, **kwargs: sent.append(kwargs["messages"]))
    with pytest.raises(Exception, match="18 or more"):
        client.chat.completions.create(
            model="parrot", messages=user(fenced({"name": "Zoë", "age": 7})), response_model=Adult, max_retries=2
        )
    assert len(sent) >= 2 and "18 or more" in json.dumps(sent[-1])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_async_lists_and_partial_answers(parrot: Server, stream: bool) -> None:
    client = patched(parrot, "MD_JSON", asynchronous=True)
    ask: dict[str, Any] = {"model": "parrot", "messages": user(fenced({"name": "Ann", "age": 40})), "max_retries": 0}
    if not stream:
        person = await client.chat.completions.create(response_model=Person, **ask)
        assert isinstance(person, Person) and (person.name, person.age) == ("Ann", 40)
        return
    parts = [p async for p in client.chat.completions.create_partial(response_model=Person, **ask)]
    assert len(parts) > 2 and (parts[-1].name, parts[-1].age) == ("Ann", 40)


def test_parallel_calls(parrot: Server) -> None:
    calling = CALLING.replace("get_weather", "GetWeather")
    calls = patched(parrot, "PARALLEL_TOOLS").chat.completions.create(
        model="parrot", messages=user(calling), response_model=Iterable[GetWeather], max_retries=0
    )
    assert [c.city for c in calls] == ["Paris", "Köln"]
