"""Documents into fixed-length rows: whole documents where they fit, long ones cut; the rest of a row is padding."""

import random
from collections.abc import Iterator

import torch
from corpus import Document
from transformers import PreTrainedTokenizerFast

IGNORED = -100


def encode(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Token ids of each document, <s> first and </s> last."""
    ids = tokenizer([d.render() for d in documents], verbose=False).input_ids
    return [[*map(int, row), int(tokenizer.eos_token_id)] for row in ids]  # pyright: ignore


def pack(documents: list[list[int]], *, length: int, window: int = 512) -> list[list[list[int]]]:
    """First-fit packing, longest first, within windows of `window` pieces, so that the shuffled order survives."""
    pieces = [d[i : i + length] for d in documents for i in range(0, len(d), length)]
    rows: list[list[list[int]]] = []
    for start in range(0, len(pieces), window):
        bins: list[tuple[int, list[list[int]]]] = []
        for piece in sorted(pieces[start : start + window], key=len, reverse=True):
            for i, (free, row) in enumerate(bins):
                if len(piece) <= free:
                    row.append(piece)
                    bins[i] = (free - len(piece), row)
                    break
            else:
                bins.append((length - len(piece), [piece]))
        rows += [row for _, row in bins]
    return rows


def tensors(rows: list[list[list[int]]], *, length: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs [B, T], labels [B, T]) where the label of a position is the next token of the same document."""
    inputs = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), IGNORED)
    for i, row in enumerate(rows):
        at = 0
        for piece in row:
            inputs[i, at : at + len(piece)] = torch.tensor(piece)
            labels[i, at : at + len(piece) - 1] = torch.tensor(piece[1:])
            at += len(piece)
    return inputs, labels


def stream(
    epochs: list[list[list[int]]], *, phases: list[tuple[float, int]], step_tokens: int, pad: int, seed: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Batches (length, inputs, labels) of about `step_tokens` tokens; `phases` are (share of the tokens, row length)."""
    shuffle = random.Random(seed)
    documents = [d for epoch in epochs for d in shuffle.sample(epoch, len(epoch))]
    total, done, at = sum(len(d) for d in documents), 0, 0
    end_share = 0.0
    for share, length in phases:
        end_share += share
        chosen = []
        while at < len(documents) and done < end_share * total:
            chosen.append(documents[at])
            done += len(documents[at])
            at += 1
        rows = pack(chosen, length=length)
        shuffle.shuffle(rows)
        size = step_tokens // length
        for start in range(0, len(rows) - size + 1, size):
            yield (length, *tensors(rows[start : start + size], length=length, pad=pad))
