"""The keys' file: what it may say, and that it is followed while it changes."""

import asyncio
import hashlib
import logging
from pathlib import Path

import pytest

from services.router.admission.base import KeyFacts, Unauthorized
from services.router.admission.keys import KeyBook, parse_keys
from tests.router.conftest import until
from twinflow.contracts.errors import BadRequest


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


FULL = f"""
[keys.team-a]
sha256 = ["{sha("old")}", "{sha("new")}"]
tenant = "a"
isolate = false
requests_per_min = 60
tokens_per_min = 100_000
concurrent = 8
weight = 2
max_priority = 5
slo_ttft_s = 1.5

[keys.team-b]
sha256 = "{sha("b's key")}"

[anonymous]
concurrent = 1
"""


def test_everything_that_a_key_can_have():
    keys = parse_keys(FULL, "keys.toml")
    a = KeyFacts("team-a", "a", False, 60, 100_000, 8, 2, 5, 1.5)
    assert keys.find("Bearer old") == keys.find("bearer  new ") == a
    assert keys.find("Bearer b's key") == KeyFacts("team-b", "team-b")
    assert keys.find("") == KeyFacts("anonymous", concurrent=1)


def test_tenants_and_salts():
    """Prefixes of who isolates, or says a salt, are its tenant's alone."""
    isolated, sharing = KeyFacts("k", "t"), KeyFacts("k", "t", isolate=False)
    assert (isolated.cache_tenant(""), isolated.cache_tenant("s")) == ("t", "t")
    assert (sharing.cache_tenant(""), sharing.cache_tenant("s")) == ("", "t")


@pytest.mark.parametrize("given", ["Bearer wrong", "Bearer", "Basic old", "old", "Bearer " + sha("old")])
def test_wrong_keys_are_refused_even_where_none_is_needed(given):
    with pytest.raises(Unauthorized) as told:
        parse_keys(FULL, "keys.toml").find(given)
    assert "old" not in told.value.message


def test_without_an_anonymous_table_a_key_is_needed():
    with pytest.raises(Unauthorized, match="Authorization: Bearer KEY"):
        parse_keys(f'[keys.a]\nsha256 = "{sha("x")}"', "keys.toml").find("")


ONE = f'[keys.a]\nsha256 = "{sha("x")}"\n'
WRONG = {
    "nothing": ("", "neither a key nor"),
    "no TOML": ("[keys", "keys.toml: "),
    "another table": ("[limits]\na = 1", "unknown 'limits'"),
    "no hash": ("[keys.a]\nweight = 1", r"\[keys.a\] sha256 must be"),
    "the key itself": ('[keys.a]\nsha256 = "s3cret"', r"\[keys.a\] sha256 must be"),
    "an empty list": ("[keys.a]\nsha256 = []", "sha256 must be"),
    "the same key twice": (f'{ONE}[keys.b]\nsha256 = "{sha("x")}"', r"\[keys.b\] has the same key as \[keys.a\]"),
    "a bad name": (f'[keys."a b"]\nsha256 = "{sha("x")}"', "'a b' is no name"),
    "a reserved name": (f'[keys.anonymous]\nsha256 = "{sha("x")}"', "'anonymous' is no name"),
    "keys is no table": ("keys = 1", "must be tables"),
    "a key is no table": ("[keys]\na = 1", "must be tables"),
    "an unknown field": (f"{ONE}limit = 1", "unknown 'limit' .known: sha256, tenant,"),
    "no whole number": (f"{ONE}requests_per_min = 1.5", "requests_per_min=1.5 must be a whole number from 1"),
    "no limit said as 0": (f"{ONE}concurrent = 0", "leave it out for no limit"),
    "a truth as a number": (f"{ONE}tokens_per_min = true", "tokens_per_min=True must be"),
    "weight": (f"{ONE}weight = 0", "weight=0 must be more than 0"),
    "priority": (f"{ONE}max_priority = 101", "from -100 to 100"),
    "slo": (f"{ONE}slo_ttft_s = inf", "slo_ttft_s=inf must be seconds"),
    "isolate": (f'{ONE}isolate = "yes"', "isolate='yes' must be true or false"),
    "tenant": (f'{ONE}tenant = ""', "tenant='' must be text"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case):
    text, message = WRONG[case]
    with pytest.raises(BadRequest, match=message) as told:
        parse_keys(text, "keys.toml")
    assert "s3cret" not in told.value.message


def test_a_file_that_is_not_there_stops_the_start(tmp_path):
    with pytest.raises(BadRequest, match=r"cannot read the API keys .*nowhere"):
        KeyBook(tmp_path / "nowhere")


def test_without_a_file_anybody_may_ask():
    book = KeyBook(None)
    assert book.find("") == book.find("Bearer whatever") == KeyFacts("anonymous")


async def test_the_file_is_followed(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO, "services.router.admission.keys")
    path = tmp_path / "keys.toml"
    path.write_text(ONE)
    book = KeyBook(path)
    watching = asyncio.create_task(book.watch(0.01))
    try:
        other = tmp_path / "other.toml"  # replaced as a whole, as Kubernetes does
        other.write_text(f'[keys.b]\nsha256 = "{sha("y")}"\n')
        other.replace(path)
        await until(lambda: book.find("Bearer y").name == "b" if sha("y") in book._keys.by_hash else False)
        with pytest.raises(Unauthorized):
            book.find("Bearer x")
        path.write_text("[keys")
        await until(lambda: book.failed_reloads == 1)
        assert book.find("Bearer y").name == "b", "a broken file changes nothing"
        path.unlink()
        await until(lambda: book.failed_reloads == 2)
        await asyncio.sleep(0.05)
        assert book.failed_reloads == 2, "what is missing is told once"
        path.write_text(ONE)
        await until(lambda: sha("x") in book._keys.by_hash)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    told = caplog.text
    assert "1 API keys (a)" in told and "1 API keys (b)" in told and "stay as they are" in told
    assert sha("x") not in told and sha("y") not in told
