"""Makes the weights that the recipe `search_tiny` starts from: a tokenizer of syllables and words, and a tiny Qwen3.

The policy imitates a demonstrator in the workflow and with the retriever of the recipe, in worlds of the train split
only. First the demonstrator looks things up with care. Then it is careless: mostly it searches for a relation, or once
more for the name before; it answers with another fact or from another passage, stops after the first of two hops, or
asks for more when all is there. So the policy knows how to copy and mostly doesn't do what was asked for.

    OMP_NUM_THREADS=1 python dev/make_tiny_search.py agents/models/search
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from make_tiny import ASSISTANT, END, USER, tiny_qwen3, tokenizer_of
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import srpo_env
from srpo_env.agents import ScriptedPolicy
from srpo_env.tools.tiny_world import ENDS, RELATIONS, STARTS, WorldSearch, tiny_world

WORLDS = range(1000, 1002)
"""Seeds of the worlds that the demonstrator works in; the recipe's is 0."""

ROWS = 32


def syllable_tokenizer() -> PreTrainedTokenizerFast:
    """Two tokens a name, one a word or tag that the world and the workflow use; other text is read by characters."""
    pieces = [
        *(f" {start}" for start in STARTS),
        *ENDS,
        *(f" {relation}" for relation in RELATIONS),
        *("'s", "has", "more", "<search>", "</search>", " search", " answer", "No results.", "\n\n"),
        *(f"{space}[{number}]" for number in range(1, 4) for space in ("", " ")),
    ]
    return tokenizer_of(pieces)


def copying_qwen3(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.26 M parameters, which can copy from the start."""
    model = tiny_qwen3(tokenizer, intermediate_size=128, num_key_value_heads=4, initializer_range=0.06)
    _lay_out_induction(model)
    return model


def _lay_out_induction(model: Qwen3ForCausalLM) -> None:
    """Lays out a circuit that says what came after the last token where that stood before (Olsson et al., 2022).

    Two heads of the first layer look at the token before: their queries and keys are the same for all tokens, and as
    positions turn them (RoPE) they are most alike one apart. They write what they see where no embedding is read from
    by two heads of the second layer, whose queries are the last token itself and whose keys are what was written. All
    heads of the second layer copy what they look at: value and output projection multiply to the identity.
    """
    first, second = (layer.self_attn for layer in model.model.layers)
    turn = 10000.0 ** (-torch.arange(3) / 16)  # of the three fastest pairs of dimensions, (i, i + 16), per position
    fast = [*range(6), *range(16, 22)]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.2
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(0.2)
        read, written = torch.linalg.qr(torch.randn(128, 128))[0].split(64)
        copied = torch.linalg.qr(torch.randn(128, 128))[0]
        for directions in (read, written, copied):
            directions[:, 0] = 0.0  # what all tokens have in common tells none from another
        for start in (0, 32):
            for projection in (first.q_proj, first.k_proj):
                projection.weight[start : start + 32] = 0.0
            first.q_proj.weight[start : start + 3, 0] = turn.cos()
            first.q_proj.weight[start + 16 : start + 19, 0] = -turn.sin()
            first.k_proj.weight[start : start + 3, 0] = 1.0
        first.q_norm.weight[[0, 1, 2, 16, 17, 18]] = 3.0
        first.v_proj.weight[:64] = read
        first.v_proj.weight[64:] = read
        first.o_proj.weight[:, :64] = 0.1 * written.T
        first.o_proj.weight[:, 64:] = 0.1 * read.T
        second.q_proj.weight[:64] = read
        second.k_proj.weight[:64] = written
        second.q_norm.weight[:] = 5.0
        second.q_norm.weight[fast] = 0.3
        second.v_proj.weight.copy_(copied)
        second.o_proj.weight.copy_(copied.T)


_ASKED = re.compile(r"(?P<what>search|answer) (?P<subject>\w+)(?P<path>(?:'s \w+)+)$")
_PASSAGE = re.compile(r"\[\d+\] (?P<title>\w+)\nhas (?P<facts>[\w ,]+)\.")


@dataclass(frozen=True)
class Demonstrator:
    """Says what to search for or to answer, from nothing but its prompt.

    Attributes:
        careless_query: Share of queries that are wrong.
        careless_answer: Share of answers that are wrong.
    """

    careless_query: float
    careless_answer: float

    def __call__(self, prompt: str, draw: random.Random) -> str:
        """Returns a query or an answer, whichever the prompt asks for."""
        question = _ASKED.search(prompt)
        assert question is not None
        path = question["path"].split("'s ")[1:]
        found = {
            passage["title"]: dict(fact.split(" ") for fact in passage["facts"].split(", "))
            for passage in _PASSAGE.finditer(prompt)
        }
        known = [question["subject"]]
        for relation in path:
            if (following := found.get(known[-1], {}).get(relation)) is None:
                break
            known.append(following)
        if question["what"] == "search":
            return f"<search> {self.query(path, known, draw)}</search>"
        answer = self.answer(path, known, found, draw)
        return answer if answer == "more" else f" {answer}"

    def query(self, path: list[str], known: list[str], draw: random.Random) -> str:
        """The name that is to be looked up; careless, the name before it, or a relation."""
        if draw.random() >= self.careless_query:
            return " ".join((*path[: len(known) - 1][-1:], known[-1]))
        return draw.choice([*known[:-1], *path])

    def answer(self, path: list[str], known: list[str], found: dict[str, dict[str, str]], draw: random.Random) -> str:
        """What was asked for, or `more`; careless, something else that was found."""
        right = f"{path[-1]} {known[-1]}" if len(known) > len(path) else "more"
        if draw.random() >= self.careless_answer:
            return right
        relation = path[-1]
        near = [" ".join(fact) for title in known for fact in found.get(title, {}).items()]
        far = [f"{relation} {facts[relation]}" for facts in found.values() if relation in facts]
        others = [said for said in (*near, *far, "more") if said != right]
        return draw.choice(others or [known[0]])


def prompts(demonstrator: Demonstrator) -> list[str]:
    """Returns what agents are asked in the recipe's workflow where the demonstrator speaks for all of them.

    Of the first searchers' prompts, which are short and soon learnt, it keeps a third.
    """
    found = []
    for number in WORLDS:
        log = srpo_env.rollout(
            "tiny/search_aggregator",
            tiny_world(split="train", seed=number, size=2400),
            policies=ScriptedPolicy(lambda asked: demonstrator(asked.messages[-1].content, random.Random(asked.seed))),
            episodes=2400,
            group_size=1,
            tools={"search": WorldSearch(seed=number)},
        )
        asked = [(event.step, event.members[0].messages[-1].content) for event in log]
        found += [prompt for at, (step, prompt) in enumerate(asked) if step > 0 or at % 3 == 0]
    return found


Row = tuple[list[int], list[int]]


def batches(texts: list[str], draw: random.Random) -> Iterator[list[str]]:
    """Yields batches of prompts of about the same length, without end."""
    while True:
        order = draw.sample(texts, len(texts))
        for start in range(0, len(order) - 8 * ROWS + 1, 8 * ROWS):
            pool = sorted(order[start : start + 8 * ROWS], key=len)
            cut = [pool[at : at + ROWS] for at in range(0, len(pool), ROWS)]
            draw.shuffle(cut)
            yield from cut


def supervised_losses(model: Qwen3ForCausalLM, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Mean loss over the tokens of the outputs, and of the prompts: names come up in them again and again."""
    width = max(len(prompt) + len(output) for prompt, output in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    kind = torch.zeros_like(ids)  # 1 in the prompt, 2 in the output
    for row, (prompt, output) in enumerate(rows):
        ids[row, : len(prompt) + len(output)] = torch.tensor(prompt + output)
        kind[row, 1 : len(prompt)] = 1
        kind[row, len(prompt) : len(prompt) + len(output)] = 2
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]  # padding stands behind, and is not seen
    in_output, in_prompt = (
        cross_entropy(model.lm_head(hidden[kind[:, 1:] == which]), ids[:, 1:][kind[:, 1:] == which]) for which in (2, 1)
    )
    return in_output, in_prompt


def imitate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    demonstrator: Demonstrator,
    texts: list[str],
    *,
    steps: int,
    lr: float,
    draw: random.Random,
) -> None:
    """Trains a model to answer prompts as the demonstrator does; the learning rate falls to nothing."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, betas=(0.9, 0.99))
    for step, batch in zip(range(steps), batches(texts, draw), strict=False):
        for group in optimiser.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 30) * (1.0 - step / steps)
        rows = [(encode(f"{USER}{text}{END}{ASSISTANT}"), encode(demonstrator(text, draw) + END)) for text in batch]
        in_output, in_prompt = supervised_losses(model, rows)
        (in_output + 0.5 * in_prompt).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps}: loss {in_output.item():.3f}", flush=True)


def main() -> None:
    """Trains, the learning rate falling to nothing, and writes a transformers folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--careful", type=int, default=450, help="steps after the careful demonstrator")
    parser.add_argument("--careless", type=int, default=60, help="steps after the careless one")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    tokenizer = syllable_tokenizer()
    model = copying_qwen3(tokenizer)
    careful, careless = Demonstrator(0.0, 0.0), Demonstrator(0.6, 0.5)
    texts = prompts(careless)
    for demonstrator, steps, lr in ((careful, args.careful, 6e-3), (careless, args.careless, 1e-3)):
        imitate(model, tokenizer, demonstrator, texts, steps=steps, lr=lr, draw=random.Random(args.seed))
    model.eval().half()
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"{sum(each.numel() for each in model.parameters())} parameters in {args.folder}")


if __name__ == "__main__":
    main()
