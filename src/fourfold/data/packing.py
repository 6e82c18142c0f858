"""Packs chats into rows of one length: each goes whole into the fullest row that still takes it, the longest first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def best_fit(lengths: Sequence[int] | NDArray[np.integer], row: int) -> list[list[int]]:
    """The numbers of the chats in each row; those longer than a row are left out. The same in every process.

    Example:
        >>> best_fit([3, 9, 5, 6, 2, 5], row=8)
        [[3, 4], [2], [5, 0]]
    """
    given = np.asarray(lengths, np.int64)
    order = np.argsort(-given, kind="stable")
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(row + 1)]  # rows by the tokens that they still take
    rooms = 0  # bit n: is there a row with room for n more?
    for chat in order[given[order] <= row].tolist():
        length = int(given[chat])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
            rows[number].append(chat)
        else:
            room, number = row, len(rows)
            rows.append([chat])
        if left := room - length:
            by_room[left].append(number)
            rooms |= 1 << left
    return rows
