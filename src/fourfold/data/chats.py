"""Chats as tokens, and which of them the loss counts: those of the assistant, by the chat template, or of a completion.

A token counts if all of its characters are the assistant's. Where the template does not mark them (``{% generation %}``), an
assistant's turn is what rendering it adds to the prompt for it. That is exact if turns that follow change nothing before them;
a template that does otherwise is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ASSISTANT = "assistant"
Message = dict[str, Any]
Spans = list[tuple[int, int]]  # of characters

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": "system",
}
_SHAPES = '"messages": [{"role", "content"}, ...], "conversations": [{"from", "value"}, ...], or "prompt" and "completion"'
_MARK_THEM = "mark the assistant's turns in the template with {% generation %} and {% endgeneration %}, and pass it with --chat-template FILE"


def template_of(tokenizer: Any) -> str | None:
    """The chat template of a tokenizer, if it has one."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


class ChatEncoder:
    """Encodes records of the usual shapes.

    Example:
        >>> encode = ChatEncoder(tokenizer)                                              # doctest: +SKIP
        >>> ids, counted = encode({"prompt": "2+2=", "completion": "4"}, "line 1")       # doctest: +SKIP
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = template_of(tokenizer)
        self._marks_turns = self._template is not None and _MARKS.search(self._template) is not None
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def __call__(self, record: Mapping[str, Any], where: str) -> tuple[list[int], NDArray[np.bool_]]:
        """(token ids, whether the loss counts each); ``where`` is for messages."""
        try:
            ids, counted = self._encode(record)
        except _NotAChat as error:
            raise ValueError(f"{where}: {error}") from None
        if not counted[1:].any():  # no position predicts the first token
            raise ValueError(
                f"{where}: no token of this chat would be learned: it has no turn of the {ASSISTANT}, or empty ones; leave it out"
            )
        return ids, counted

    def _encode(self, record: Mapping[str, Any]) -> tuple[list[int], NDArray[np.bool_]]:
        prompt, completion = record.get("prompt"), record.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            ids, counted = self._tokens(
                prompt + completion, [(len(prompt), len(prompt) + len(completion))], begins=True
            )
            return [*ids, self._tokenizer.eos_token_id], np.append(counted, True)
        messages, first = _messages(record)
        tools = record.get("tools") or None
        text, spans = self._turns(messages, first, tools)
        return self._tokens(text, spans, begins=False)

    def _tokens(self, text: str, spans: Spans, *, begins: bool) -> tuple[list[int], NDArray[np.bool_]]:
        """``begins``: with the token that begins a text, which templates write themselves."""
        encoded = self._backend.encode(text, add_special_tokens=begins)
        ids, offsets = encoded.ids, encoded.offsets
        counted = np.zeros(len(ids), np.bool_)
        # Some tokenizers leave spaces out of their offsets: a token begins where the one before ends.
        ends = [0, *(stop for _, stop in offsets[:-1])]
        for first, stop in spans:
            inside = [
                number
                for number, (at, end) in enumerate(offsets)
                if first <= min(at, ends[number]) and at < end <= stop
            ]
            counted[inside] = True
            counted[self._after_the_turn(inside, ids, offsets, text)] = False
        return ids, counted

    def _after_the_turn(
        self, inside: list[int], ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str
    ) -> list[int]:
        """Tokens of white space after the special token that ends a turn: nothing has to write them."""
        if self._marks_turns:
            return []
        blank: list[int] = []
        for number in reversed(inside):
            if ids[number] in self._special:
                return blank
            if text[slice(*offsets[number])].strip():
                break
            blank.append(number)
        return []

    # -- the template -----------------------------------------------------------------------------------------------------

    def _turns(self, messages: list[Message], first: int, tools: Any) -> tuple[str, Spans]:
        """(the chat as text, what the assistant wrote in it from message ``first`` on)."""
        if self._template is None:
            raise _NotAChat("the tokenizer has no chat template; pass one with --chat-template FILE")
        text, marked = self._render(messages, tools, is_marked=self._marks_turns)
        if self._marks_turns:
            begins = len(self._prefix(text, messages[:first], tools, first)) if first else 0
            return text, [(start, stop) for start, stop in marked if start >= begins]
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") == ASSISTANT and number >= first:
                begins = len(self._prefix(text, messages[:number], tools, number))
                until, _ = self._render(messages[: number + 1], tools)
                if not text.startswith(until):
                    raise _NotAChat(self._changes(number))
                spans.append((begins, len(until)))
        return text, spans

    def _prefix(self, text: str, before: list[Message], tools: Any, number: int) -> str:
        """What is there when the assistant begins to write message ``number``."""
        if not before:
            raise _NotAChat(
                f"it begins with the {ASSISTANT}, before which the chat template writes nothing; {_MARK_THEM}"
            )
        prefix, _ = self._render(before, tools, prompts=True)
        if not text.startswith(prefix):
            raise _NotAChat(self._changes(number))
        return prefix

    def _changes(self, number: int) -> str:
        name = self._tokenizer.name_or_path or "the tokenizer"
        return (
            f"the chat template of {name} writes message {number} in another way when it is not the last one, so that it does not say "
            f"which tokens are the {ASSISTANT}'s; {_MARK_THEM}"
        )

    def _render(
        self, messages: list[Message], tools: Any, *, prompts: bool = False, is_marked: bool = False
    ) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, marked = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=prompts,
                return_assistant_tokens_mask=is_marked,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template raises whatever it likes
            raise _NotAChat(f"the chat template rejects it: {error}") from None
        return rendered[0], marked[0] if is_marked else []


class _NotAChat(ValueError):
    """A record that cannot be encoded; the caller knows where it is."""


def _messages(record: Mapping[str, Any]) -> tuple[list[Message], int]:
    """(the messages of a record, the first of them that may be learned)."""
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return list(_cleaned([*prompt, *completion])), len(prompt)
    if isinstance(record.get("messages"), list):
        return list(_cleaned(record["messages"])), 0
    if isinstance(record.get("conversations"), list):
        return [_from_sharegpt(turn) for turn in _cleaned(record["conversations"])], 0
    raise _NotAChat(f"it has the fields {', '.join(sorted(record))}, and a chat has {_SHAPES}")


def _cleaned(messages: Sequence[Any]) -> Iterator[Message]:
    for message in messages:
        if not isinstance(message, dict):
            raise _NotAChat(f"a message is {type(message).__name__}, not an object; a chat has {_SHAPES}")
        # Tables have every field in every row.
        yield {name: value for name, value in message.items() if value is not None}


def _from_sharegpt(turn: Message) -> Message:
    if turn.get("role") is not None:
        return turn
    role = _SHAREGPT_ROLES.get(str(turn.get("from")))
    if role is None or "value" not in turn:
        raise _NotAChat(
            f"a turn has the fields {', '.join(sorted(turn))} and is from {turn.get('from')!r}; use from "
            f"{', '.join(_SHAREGPT_ROLES)} with a value, or messages with roles"
        )
    return {"role": role, "content": turn["value"]}
