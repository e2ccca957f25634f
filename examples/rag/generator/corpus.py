"""A world: people, works, companies, places and what they have to do with each other, a passage for each fact.

    names  ->  facts (subject, relation, object)  ->  passages;  chains of facts  ->  questions

Names are two common name words. A split has names of its own (`split_of`), made of the same words: "Mara Holt" is in
one split, "Mara Velden" may be in another. Passages about names that share a word, and other facts about the same name,
are the near misses of a search.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from retriever import Passage, Retriever

__all__ = ["RELATIONS", "SPLITS", "Fact", "Question", "Relation", "World", "build_questions", "build_world", "split_of"]

SPLITS = {"validation": 0.1, "train": 0.4, "starter": 0.5}
"""Split -> share of all names."""

_NAME_WORDS = {
    "first": "Ada Anton Basil Clara Conrad Dora Edgar Elsa Felix Flora Greta Hugo Ida Iris Jonas Judith Klaus Lena Leo Lydia Mara Marcus "
    "Mira Nadia Nora Oscar Otto Paula Petra Quentin Rita Roland Rosa Simon Stella Tessa Theo Ursula Victor Wanda",
    "last": "Abbot Alder Barlow Birch Brandt Calder Carver Dalton Drake Ellis Falk Finch Garner Graves Hale Holt Hurst Kessel Lambert "
    "Larsen Marsh Mercer Norden Oakes Pike Quill Ramsey Reeve Sander Sorrel Tanner Thorne Unger Vance Velden Walker Weston Winter Yates "
    "Zeller",
    "adjective": "Bitter Blue Bright Broken Cold Crimson Distant Empty Endless Fading Final First Golden Hidden Hollow Iron Last Lonely "
    "Lost Narrow Pale Quiet Red Restless Silent Silver Small Stolen Sudden White",
    "noun": "Autumn Bridge Candle Castle Crown Dawn Door Empire Feather Forest Garden Harbor Hour Island Journey Lantern Letter Meadow "
    "Mirror Mountain Ocean Orchard Promise River Road Shadow Song Storm Tower Window",
    "trade": "Bank Brothers Foods Group Mills Motors Press Records Steel Works",
    "place": "Bay City Cross Falls Green Hill Point Springs Town Valley",
    "study": "Academy College Institute School University",
}
_NAMES = {
    "person": ("first", "last"),
    "work": ("adjective", "noun"),
    "company": ("last", "trade"),
    "city": ("last", "place"),
    "school": ("last", "study"),
}
"""Kind of thing -> the words its names are made of, first and second."""
_NOUNS = {
    "person": "actor doctor farmer lawyer painter pilot singer teacher writer",
    "work": "ballad comedy film novel opera play poem story",
    "company": "business company firm",
    "city": "city place town",
    "school": "institution school",
}
_REMARKS = (
    "as old letters say",
    "as the museum notes",
    "according to most records",
    "after many years abroad",
    "although few remember it",
    "since the great fire",
    "to everyone's surprise",
    "which guides often mention",
)


@dataclass(frozen=True, slots=True)
class Relation:
    subject: str
    """Kind of thing."""
    object: str
    wordings: tuple[str, ...]
    """How a question names the object: {} is the subject."""


RELATIONS = {
    "birthplace": Relation("person", "city", ("the birthplace of {}", "the city where {} was born")),
    "employer": Relation("person", "company", ("the employer of {}", "the company that pays {}")),
    "school": Relation("person", "school", ("the school of {}", "the place where {} studied")),
    "spouse": Relation("person", "person", ("the spouse of {}", "the one married to {}")),
    "author": Relation("work", "person", ("the author of {}", "the person who wrote {}")),
    "publisher": Relation("work", "company", ("the publisher of {}", "the company that sold {}")),
    "setting": Relation("work", "city", ("the setting of {}", "the city shown in {}")),
    "founder": Relation("company", "person", ("the founder of {}", "the person who started {}")),
    "seat": Relation("company", "city", ("the seat of {}", "the city that houses {}")),
    "mayor": Relation("city", "person", ("the mayor of {}", "the person who governs {}")),
    "principal": Relation("school", "person", ("the principal of {}", "the person who heads {}")),
    "location": Relation("school", "city", ("the location of {}", "the city around {}")),
}


@dataclass(frozen=True, slots=True)
class Fact:
    subject: str
    relation: str
    object: str
    passage: Passage

    @property
    def query(self) -> str:
        """The search that finds the passage."""
        return f"{self.relation} of {self.subject}"

    @property
    def statement(self) -> str:
        """The part of the passage that says it."""
        return self.passage.text.partition(",")[0]


@dataclass(frozen=True, slots=True)
class World:
    facts: tuple[Fact, ...]

    @property
    def passages(self) -> list[Passage]:
        return [fact.passage for fact in self.facts]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for fact in self.facts for name in (fact.subject, fact.object))


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    hops: tuple[Fact, ...]
    """The chain: each hop's object is the next one's subject, the last one's object is the answer."""

    @property
    def answer(self) -> str:
        return self.hops[-1].object


def split_of(name: str) -> str:
    """The one split that a name may occur in."""
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
    for split, size in SPLITS.items():
        if share < size:
            return split
        share -= size
    return split


def build_world(
    split: str, counts: dict[str, int], rng: random.Random, *, taken: frozenset[str] = frozenset()
) -> World:
    """So many things of each kind, with names of `split` but those `taken`, and one fact for each relation of each.

    Raises `ValueError` where the split has fewer names than that.
    """
    names: dict[str, list[str]] = {}
    for kind, (firsts, seconds) in _NAMES.items():
        pairs = product(_NAME_WORDS[firsts].split(), _NAME_WORDS[seconds].split())
        own = [name for first, second in pairs if split_of(name := f"{first} {second}") == split and name not in taken]
        if len(own) < counts[kind]:
            raise ValueError(f"split {split!r} has {len(own)} names for {kind!r}, not {counts[kind]}")
        names[kind] = rng.sample(own, counts[kind])
    facts: list[Fact] = []
    for kind, own in names.items():
        for subject in own:
            noun = rng.choice(_NOUNS[kind].split())
            for relation, kinds in RELATIONS.items():
                if kinds.subject == kind:
                    target = rng.choice([name for name in names[kinds.object] if name != subject])
                    text = f"The {relation} of this {noun} is {target}, {rng.choice(_REMARKS)}."
                    facts.append(Fact(subject, relation, target, Passage(title=subject, text=text)))
    rng.shuffle(facts)
    return World(tuple(facts))


def build_questions(
    world: World, hops: int, count: int, rng: random.Random, retriever: Retriever, shown: int
) -> Iterator[Question]:
    """Different questions of so many hops. Of each hop, the right search shows the right passage among the first
    `shown`."""
    by_subject: dict[str, list[Fact]] = {}
    for fact in world.facts:
        by_subject.setdefault(fact.subject, []).append(fact)
    asked: set[tuple[Fact, ...]] = set()
    for _ in range(count * 20):
        if len(asked) == count:
            return
        chain = [rng.choice(world.facts)]
        while len(chain) < hops:
            chain.append(rng.choice(by_subject[chain[-1].object]))
        hopped = tuple(chain)
        if hopped in asked or not _is_telling(chain) or not all(_is_found(fact, retriever, shown) for fact in chain):
            continue
        asked.add(hopped)
        yield Question(text=_wording(chain, rng), hops=hopped)
    raise ValueError(f"a world of {len(world.facts)} facts has no {count} questions of {hops} hops")


def _is_telling(chain: list[Fact]) -> bool:
    """Whether no name comes up twice, also not by one of its words: a wrong name then never earns a part of the
    reward."""
    words = [word for name in (chain[0].subject, *(fact.object for fact in chain)) for word in name.split()]
    return len(set(words)) == len(words) and all(left.relation != right.relation for left, right in pairwise(chain))


def _is_found(fact: Fact, retriever: Retriever, shown: int) -> bool:
    return fact.passage in retriever.search(fact.query, shown)


def _wording(chain: Iterable[Fact], rng: random.Random) -> str:
    text = ""
    for fact in chain:
        text = rng.choice(RELATIONS[fact.relation].wordings).format(text or fact.subject)
    return f"what is {text} ?"
