"""Chats: which tokens the loss counts, how they are packed, and what a model makes of them."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.cli.main import main
from fourfold.data.chats import ChatEncoder
from fourfold.data.loader import Loader
from fourfold.data.mixture import open_mixture
from fourfold.data.packing import best_fit
from fourfold.data.prepare import Settings, prepare
from fourfold.data.samples import NO_LABEL, Samples
from fourfold.data.tokenizer import load_tokenizer, train_tokenizer
from tests.models import build

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{{ m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: the reasoning of a turn is left out when others follow.
FORGETS = CHATML.replace(
    "{{ m['content'] +",
    "{{ ('<think></think>' if loop.last and m['role'] == 'assistant' else '') + m['content'] +",
)
TEXT = ["two plus three is five, and one more is six; user assistant system: what? yes no"] * 9


@functools.cache
def tokenizer(template: str | None = CHATML) -> Any:
    made = train_tokenizer(TEXT, 300)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def chat(*turns: str) -> list[dict[str, str]]:
    """Turns of the user and the assistant, in turn; one that begins with "system:" is the system's."""
    roles = iter(("user", "assistant") * len(turns))
    return [
        {"role": "system", "content": t[7:]}
        if t.startswith("system:")
        else {"role": next(roles), "content": t}
        for t in turns
    ]


def learned(record: dict[str, Any], template: str | None = CHATML) -> str:
    """The text of a record, with what the loss counts in brackets."""
    own = tokenizer(template)
    ids, counted = ChatEncoder(own)(record, "here")
    assert len(ids) == len(counted)
    pieces = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(counted)) + 1)
    words = [(own.decode(np.array(ids)[piece]), counted[piece[0]]) for piece in pieces]
    return "".join(f"[{text}]" if counts else text for text, counts in words).replace("\n", "/")


ANSWERED = (
    "<|im_start|>system/be brief<|im_end|>/<|im_start|>user/2+2?<|im_end|>/<|im_start|>assistant/[4<|im_end|>]/"
    "<|im_start|>user/sure?<|im_end|>/<|im_start|>assistant/[yes<|im_end|>]/"
)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_turns_of_the_assistant_are_learned_to_the_token_that_ends_them(template: str) -> None:
    messages = chat("system:be brief", "2+2?", "4", "sure?", "yes")
    assert learned({"messages": messages}, template) == ANSWERED
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
    assert learned({"conversations": turns}, template) == ANSWERED
    # Of a prompt with answers nothing is learned.
    record = {"prompt": messages[:-1], "completion": messages[-1:]}
    assert learned(record, template) == ANSWERED.replace("[4<|im_end|>]", "4<|im_end|>")


def test_marked_and_derived_turns_agree_with_transformers() -> None:
    messages = chat("what is two plus three?", "  five\n\nand six", "é😀?", "no 😀\n")
    theirs = tokenizer(MARKED).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    for template in (CHATML, MARKED):
        ids, counted = ChatEncoder(tokenizer(template))({"messages": messages}, "here")
        assert ids == theirs["input_ids"]
        assert counted.astype(int).tolist() == theirs["assistant_masks"]


def test_a_completion_is_learned_with_the_end_of_text() -> None:
    assert learned({"prompt": "two plus", "completion": " three"}) == "two plus[ three<|endoftext|>]"


@settings(max_examples=60, deadline=None)
@given(prompt=st.text(max_size=12), completion=st.text(min_size=1, max_size=12))
def test_a_token_counts_if_all_of_its_characters_are_of_the_completion(prompt: str, completion: str) -> None:
    own = tokenizer()
    text = prompt + completion
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    offsets = own.backend_tokenizer.encode(text).offsets
    wanted = [first >= len(prompt) for first, _ in offsets]
    if not any(wanted[1:]):
        return
    _, counted = ChatEncoder(own)({"prompt": prompt, "completion": completion}, "here")
    assert counted.tolist() == [*wanted, True]


@pytest.mark.parametrize(
    ("record", "template", "message"),
    [
        (
            {"messages": chat("a", "b", "c", "d")},
            FORGETS,
            r"writes message 1 in another way when .*generation",
        ),
        ({"messages": chat("a", "b")}, None, r"no chat template; pass one with --chat-template"),
        ({"messages": chat("a")}, CHATML, r"no token of this chat would be learned"),
        ({"messages": chat("a")}, MARKED, r"no token of this chat would be learned"),
        ({"messages": chat("a", "b")[1:]}, CHATML, r"begins with the assistant"),
        ({"text": "a"}, CHATML, r'has the fields text, and a chat has "messages"'),
        ({"messages": ["a"]}, CHATML, r"a message is str, not an object"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, CHATML, r"is from 'bot'; use from human"),
        ({"messages": chat("a", "b")}, "{{ raise_exception('no system') }}", r"rejects it: no system"),
    ],
)
def test_what_cannot_be_learned_exactly_is_an_error(record: Any, template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^line 7: .*{message}"):
        ChatEncoder(tokenizer(template))(record, "line 7")


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=60), row=st.integers(2, 30))
def test_rows_hold_each_chat_once_and_no_two_rows_fit_into_one(lengths: list[int], row: int) -> None:
    rows = best_fit(lengths, row)
    assert sorted(n for found in rows for n in found) == [
        n for n, length in enumerate(lengths) if length <= row
    ]
    full = [sum(lengths[n] for n in found) for found in rows]
    assert all(tokens <= row for tokens in full)
    assert all(a + b > row for i, a in enumerate(full) for b in full[:i])


# -- prepared ---------------------------------------------------------------------------------------------------------

CHATS = [
    chat(f"{a} plus {b}?", f"it is {a + b}", "sure?", "yes")[: 2 + 2 * (a % 2)]
    for a in range(9)
    for b in range(9)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats in several parts and shards, prepared by several processes."""
    where = tmp_path_factory.mktemp("chats")
    tokenizer().save_pretrained(where / "tokenizer")
    (where / "a.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in CHATS))
    small = Settings(
        tokenizer=str(where / "tokenizer"), chats=True, validation=0.2, part_bytes=3_000, shard_tokens=500
    )
    prepare(where / "data", [str(where / "a.jsonl")], small, processes=2)
    return where / "data"


def in_samples(folder: Path, split: Any, length: int) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of each chat of all samples."""
    samples, found = Samples(folder, split, length), []
    for number in range(len(samples)):
        ids, labels, positions = samples[number]
        assert len(ids) == len(labels) == length
        cuts = np.flatnonzero(positions == 0)[1:]
        found += [
            (own.tolist(), said.tolist())
            for own, said in zip(np.split(ids, cuts), np.split(labels, cuts), strict=True)
            if (said != NO_LABEL).any()  # not what fills a sample up
        ]
    return found


def test_each_chat_is_whole_in_a_sample_with_its_labels(folder: Path) -> None:
    encode = ChatEncoder(load_tokenizer(folder / "tokenizer"))
    wanted = []
    for messages in CHATS:
        ids, counted = encode({"messages": messages}, "here")
        wanted.append((ids, [i if c else NO_LABEL for i, c in zip(ids, counted, strict=True)]))
    longest = max(len(ids) for ids, _ in wanted)
    found = in_samples(folder, "train", longest + 5)
    held_out = in_samples(folder, "validation", longest + 5)
    assert len(held_out) > 3
    assert sorted(found + held_out) == sorted(wanted)

    shortest = min(len(ids) for ids, _ in wanted)
    kept = in_samples(folder, "train", longest - 1)
    assert sorted(kept) == sorted(pair for pair in found if len(pair[0]) < longest)
    assert Samples(folder, "train", longest - 1).too_long == len(found) - len(kept) > 0
    with pytest.raises(ValueError, match=rf"all \d+ chats are longer than a sample of {shortest - 1} tokens"):
        open_mixture([(folder, 1.0)], length=shortest - 1, seed=0)


def test_the_result_does_not_depend_on_the_kind_of_file(folder: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"messages": CHATS}), tmp_path / "a.parquet", row_group_size=20)
    given = Settings(tokenizer=str(folder / "tokenizer"), chats=True, validation=0.2)
    prepare(tmp_path / "data", [str(tmp_path / "a.parquet")], given)
    assert sorted(in_samples(tmp_path / "data", "train", 90)) == sorted(in_samples(folder, "train", 90))


def test_the_command_prepares_and_shows_chats(folder: Path, tmp_path: Path, capsys: Any) -> None:
    chats, template = tmp_path / "a.jsonl", tmp_path / "marked.jinja"
    chats.write_text("".join(json.dumps({"messages": m}) + "\n" for m in CHATS[:9]))
    template.write_text(MARKED)
    without = str(tmp_path / "without")
    train_tokenizer(TEXT, 300).save_pretrained(without)
    out = str(tmp_path / "data")
    command = ["data", "prepare", out, str(chats), "--processes", "1", "--validation", "0"]
    assert main([*command, "--tokenizer", without]) == 2
    assert "if it has chats, use --chats" in capsys.readouterr().err
    assert main([*command, "--tokenizer", without, "--chats"]) == 2
    assert (
        "a.jsonl, byte 0: the tokenizer has no chat template; pass one with --chat-template"
        in capsys.readouterr().err
    )
    assert main([*command, "--tokenizer", without, "--chats", "--chat-template", str(template)]) == 0
    assert load_tokenizer(tmp_path / "data" / "tokenizer").chat_template == MARKED  # which an export has, too
    capsys.readouterr()
    assert main(["data", "info", out, "--show", "1", "--seq-len", "90"]) == 0
    shown = capsys.readouterr().out
    assert "of 9 chats in" in shown
    assert "«it is 0<|im_end|>»" in shown.replace("\n", "")
    assert "samples of 90 tokens" in shown


# -- what a model makes of them ---------------------------------------------------------------------------------------


def one_by_one(folder: Path, length: int, rows: int) -> float:
    model = build("llama", vocab_size=400)
    mixture = open_mixture([(folder, 1.0)], length=length, seed=0)
    total, count = 0.0, 0
    for sample in mixture.samples(0, rows):
        cuts = np.flatnonzero(sample.position_ids == 0)[1:]
        for ids, labels in zip(np.split(sample.input_ids, cuts), np.split(sample.labels, cuts), strict=True):
            learned = int((labels[1:] != NO_LABEL).sum())
            if learned:
                loss = model(input_ids=torch.tensor(ids)[None], labels=torch.tensor(labels)[None]).loss
                total, count = total + loss.item() * learned, count + learned
    return total / count


def packed(folder: Path, shape: tuple[int, int, int, int], length: int, rows: int) -> float:
    model, grid = build("llama", vocab_size=400), Grid.create(shape)
    ff.parallelize(model, grid)
    batch = Loader(open_mixture([(folder, 1.0)], length=length, seed=0), grid, global_batch=rows).read(0)
    return model(**batch.inputs).loss.item()


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 2, 1), (2, 1, 1, 2)])
def test_the_loss_of_packed_chats_equals_that_of_separate_chats(
    pool: RankPool, folder: Path, shape: tuple[int, int, int, int]
) -> None:
    alone = one_by_one(folder, 160, 4)
    for loss in pool.run(packed, int(np.prod(shape)), folder, shape, 160, 4):
        assert loss == pytest.approx(alone, rel=2e-6)
