"""A serving engine in miniature: continuous batching over a paged K/V cache.

Requests arrive, grow by a token a step and leave; their pages go to those that come after. On a
GPU each batch size is recorded as one CUDA graph, of which tokens, page numbers and lengths are
data. The tokens are those of the same model run densely, with the pass off and on.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fusion_pass

BATCH_SIZES = (2, 4, 8)
PAGE_SIZE, PAGES, ROW_PAGES = 4, 40, 8
VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 97, 64, 4, 2, 32, 2
# Rows that pad a batch write there, and nobody reads it.
SCRATCH_PAGE = 0

device = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    """Gated attention over pages, or over a whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (2 * HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        self.project = nn.Linear(WIDTH, sum(self.sizes), bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        for name in ("key_pages", "value_pages"):
            self.register_buffer(name, torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, gate, key and value, each (rows, heads, D)."""
        fused, key, value = self.project(F.rms_norm(x, (WIDTH,))).split(self.sizes, -1)
        query, gate = fused.view(-1, HEADS, 2 * HEAD_DIM).chunk(2, -1)
        stored = (each.view(-1, KV_HEADS, HEAD_DIM) for each in (key, value))
        return query, gate, *stored

    def finish(self, x: Tensor, output: Tensor, gate: Tensor) -> Tensor:
        return x + self.out((output * torch.sigmoid(gate)).flatten(1))

    def forward(self, x: Tensor, positions: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        """One token a request: it is written to its page, then attends to all of its pages."""
        query, gate, key, value = self.heads(x)
        page = table.gather(1, positions[:, None] // PAGE_SIZE)[:, 0]
        self.key_pages[page, positions % PAGE_SIZE] = key
        self.value_pages[page, positions % PAGE_SIZE] = value
        output = fusion_pass.paged_decode_attention(
            query, self.key_pages, self.value_pages, None, table, kv_lengths=lengths
        )
        return self.finish(x, output, gate)

    def dense(self, x: Tensor) -> Tensor:
        """All tokens (S, width) of one request at once, without a cache."""
        query, gate, *stored = (each.transpose(0, 1) for each in self.heads(x))
        output = F.scaled_dot_product_attention(query, *stored, is_causal=True, enable_gqa=True)
        return self.finish(x, output.transpose(0, 1), gate.transpose(0, 1))


class Model(nn.Module):
    """A decoder with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(ROW_PAGES * PAGE_SIZE, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def logits(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,)) @ self.tokens.weight.T

    def forward(self, tokens: Tensor, positions: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        """The next token of each request."""
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, positions, table, lengths)
        return self.logits(x).argmax(-1)

    def dense(self, tokens: Tensor) -> Tensor:
        """The token that follows one sequence."""
        x = self.tokens(tokens) + self.positions.weight[: len(tokens)]
        for layer in self.layers:
            x = layer.dense(x)
        return self.logits(x[-1]).argmax(-1)


class Step:
    """The compiled model for one batch size, with inputs that stay where they are."""

    def __init__(self, model: Callable[..., Tensor], size: int) -> None:
        self.inputs = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(3)]
        self.inputs.insert(2, torch.full((size, ROW_PAGES), SCRATCH_PAGE, device=device))
        self.call = lambda: model(*self.inputs)
        if device == "cuda":
            self.call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = self.call()
            self.call = lambda: (graph.replay(), output)[1]

    def __call__(self, rows: list[tuple[int, int, list[int], int]]) -> list[int]:
        padding = [(0, 0, [SCRATCH_PAGE] * ROW_PAGES, 0)] * (len(self.inputs[0]) - len(rows))
        for held, column in zip(self.inputs, zip(*rows, *padding, strict=True), strict=True):
            held.copy_(torch.tensor(column))
        return self.call().tolist()[: len(rows)]


@dataclass
class Request:
    """A prompt, when it arrives (in steps) and how many tokens it wants."""

    arrival: int
    prompt: list[int]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    done: int = 0

    @property
    def room(self) -> int:
        """The pages that it will need in the end."""
        return -(-(len(self.prompt) + self.wanted) // PAGE_SIZE)

    def row(self, free: list[int]) -> tuple[int, int, list[int], int]:
        """Token, position, page table and length of its next step; takes a page if it must."""
        if self.done % PAGE_SIZE == 0:
            self.pages.append(free.pop())
        token = (self.prompt + self.tokens)[self.done]
        table = self.pages + [SCRATCH_PAGE] * (ROW_PAGES - len(self.pages))
        return token, self.done, table, self.done + 1


def serve(steps: dict[int, Step], requests: list[Request]) -> Iterator[int]:
    """Fill in the tokens of all requests; yields the size of each step's batch."""
    free, clock = [page for page in range(PAGES) if page != SCRATCH_PAGE], 0
    waiting, active = sorted(requests, key=lambda request: request.arrival), list[Request]()
    while waiting or active:
        while waiting and waiting[0].arrival <= clock and len(active) < BATCH_SIZES[-1]:
            if sum(each.room for each in (*active, waiting[0])) >= PAGES:
                break
            active.append(waiting.pop(0))
        clock += 1
        if not active:
            continue
        size = next(size for size in BATCH_SIZES if size >= len(active))
        found = steps[size]([request.row(free) for request in active])
        for request, token in zip(tuple(active), found, strict=True):
            request.done += 1
            if request.done >= len(request.prompt):
                request.tokens.append(token)
            if len(request.tokens) == request.wanted:
                active.remove(request)
                free += request.pages
        yield size
    assert len(set(free)) == PAGES - 1, "a page was lost"


def make_requests(count: int = 14) -> list[Request]:
    number = random.Random(1).randrange
    drawn = [(number(0, 24), number(1, 9), number(1, 20)) for _ in range(count)]
    return [Request(at, [number(0, VOCABULARY) for _ in range(n)], m) for at, n, m in drawn]


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model = Model().to(device).eval()
    expected = make_requests()
    for request in expected:
        for _ in range(request.wanted):
            tokens = torch.tensor(request.prompt + request.tokens, device=device)
            request.tokens.append(int(model.dense(tokens)))

    for is_on in (False, True):
        torch._dynamo.reset()
        with fusion_pass.enable(devices=(device,)) if is_on else contextlib.nullcontext():
            # Without graphs to record one compilation serves every batch size.
            compiled = torch.compile(model, dynamic=device == "cpu")
            step = compiled if is_on or device == "cuda" else model
            steps = {size: Step(step, size) for size in BATCH_SIZES}
            requests = make_requests()
            sizes = list(serve(steps, requests))
        assert [each.tokens for each in requests] == [each.tokens for each in expected]
        print(f"pass {'on' if is_on else 'off'}: {len(sizes)} steps, {len(set(sizes))} batch sizes")
    print("counters:", dict(counters["fusion_pass"]))
    assert counters["fusion_pass"]["fused"] % LAYERS == 0 < counters["fusion_pass"]["fused"]


if __name__ == "__main__":
    # What comes from Inductor's cache is not counted.
    torch.compiler.config.force_disable_caches = True
    main()
