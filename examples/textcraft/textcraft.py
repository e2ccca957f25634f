"""TextCraft as a task source in one file: items are crafted from an inventory, and a rollout is scored by a replay.

data ─► TextCraft.tasks ─► Task(input: goal, inventory, recipes) ─► play (one JSON move a turn) ─► log ─► reward

The data is that of the package platoon-textcraft 0.3 (MIT), read out of its wheel or an unpacked folder of it.
"""

import json
import random
import zipfile
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from lightningrl import Task
from lightningrl.errors import ConfigError

FILES = {"train": "textcraft_train.jsonl", "validation": "textcraft_val.jsonl"}
FETCH = "pip download --no-deps --only-binary=:all: --python-version 3.12 platoon-textcraft==0.3.0"
SYSTEM = """You craft items. Each turn, reply with one JSON object and nothing else:
{"info": "ITEM"}                                            how an item is crafted
{"inventory": true}                                         what you have
{"craft": "ITEM", "times": 1, "using": {"ITEM": 1}}         craft it; `using` is for all times together
{"finish": true}                                            you are done"""


class World:
    """An inventory and what may be crafted from it. `recipes`: for an item, each way of making it once."""

    def __init__(self, inventory, recipes):
        self.start, self.inventory, self.recipes = Counter(inventory), Counter(inventory), recipes
        self.is_finished = False

    def craft(self, item, times, using):
        """Craft an item and say how it went; a move that is against the rules changes nothing."""
        if not isinstance(times, int) or isinstance(times, bool) or times < 1 or not isinstance(using, dict):
            return 'error: write {"craft": "ITEM", "times": 1, "using": {"ITEM": 1}}'
        for way in self.recipes.get(item, ()):
            if {name: count * times for name, count in way["from"].items()} != using:
                continue
            if lacks := [name for name, count in using.items() if self.inventory[name] < count]:
                return f"error: not enough {', '.join(lacks)}"
            self.inventory.subtract(using)
            self.inventory[item] += way["makes"] * times
            return f"crafted {way['makes'] * times} {item}"
        return f"error: {item} is not crafted {times} times from that; ask for its info"

    def move(self, action):
        """Play one move and return what the player is told."""
        if not isinstance(action, dict) or len(action.keys() & {"info", "inventory", "craft", "finish"}) != 1:
            return "error: write one JSON object with info, inventory, craft or finish"
        if "info" in action:
            return json.dumps(self.recipes.get(str(action["info"])) or "it is not crafted; look into the inventory")
        if "inventory" in action:
            return json.dumps({name: count for name, count in self.inventory.items() if count})
        if "finish" in action:
            self.is_finished = True
            return "finished"
        return self.craft(str(action["craft"]), action.get("times", 1), action.get("using"))

    def has(self, goal):
        """Whether all that was asked for was made, on top of what was there."""
        return all(self.inventory[item] - self.start[item] >= count for item, count in goal.items())


class TextCraft:
    """Tasks of `data`; `steps`: only those whose gold crafts at most so often; `turns`: the most moves of a rollout."""

    requires = frozenset()

    def __init__(self, *, data="platoon_textcraft-0.3.0-py3-none-any.whl", steps=None, turns=20, recipe_folder="."):
        self.data, self.steps, self.turns = Path(recipe_folder, data), steps, turns
        if not self.data.exists():
            raise ConfigError(f"no {str(self.data)!r}; fetch it: {FETCH} -d {self.data.parent}")

    def tasks(self, split, /, *, seed, count):
        """Yield a split's tasks in the order of the seed. An id may be that of two rows, and of both files: so its file
        and its row go before."""
        if split not in FILES:
            raise ConfigError(f"TextCraft has no split {split!r}; it has: {', '.join(FILES)}")
        rows = [
            (number, row)
            for number, row in enumerate(read(self.data, FILES[split]))
            if self.steps is None or len(gold_moves(row)) <= self.steps
        ]
        random.Random(seed).shuffle(rows)
        book = read_book(self.data)
        for number, row in rows[:count]:
            goal, moves = row["misc"]["target_items"], gold_moves(row)
            items = {item for move in moves for item in (move["craft"], *move["using"])} | set(goal)
            world = {"goal": goal, "inventory": row["misc"]["initial_inventory"]}
            recipes = {item: book[item] for item in sorted(items) if item in book}
            yield Task(id=f"{split}/{number}-{row['id']}", input={**world, "recipes": recipes}, answer=moves)

    def agent(self, task):
        """Let the model play; the log of its moves is the output."""
        import openai

        client, world, log = openai.OpenAI(), World(task["inventory"], task["recipes"]), []
        goal = ", ".join(f"{count}x {item}" for item, count in task["goal"].items())
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Craft the following items: {goal}"},
        ]
        while len(log) < self.turns and not world.is_finished:
            reply = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
            text = reply.choices[0].message.content or ""
            log.append(parse(text))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": world.move(log[-1])}]
        return log

    def reward(self, task, output, trajectory=None):
        """1 where the replayed moves make all that was asked for and then finish, else 0."""
        world = World(task.input["inventory"], task.input["recipes"])
        for action in output if isinstance(output, list) else ():
            if not world.is_finished:
                world.move(action)
        return float(world.is_finished and world.has(task.input["goal"]))

    def gold(self, task):
        """The data's own moves. In 9 of its tasks they do not earn the reward."""
        return [*task.answer, {"finish": True}]


def parse(text):
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def gold_moves(row):
    return [
        {"craft": step["target"][0], "times": step["target"][1], "using": step["ingredients"]}
        for step in row["misc"]["gold_trajectory"]
    ]


def read(data, name):
    """The rows of a file, from a wheel or a folder."""
    place = f"platoon_textcraft/data/{name}"
    if data.is_dir():
        lines = (data / place).read_text(encoding="utf-8").splitlines()
    else:
        with zipfile.ZipFile(data) as wheel:
            lines = wheel.read(place).decode().splitlines()
    return [json.loads(line) for line in lines if line.strip()]


@cache
def read_book(data):
    """All recipes that the data's gold uses: for an item, each way of making it once. `target` counts the times, and
    `result_count` what comes of all of them."""
    book = defaultdict(list)
    for name in FILES.values():
        for row in read(data, name):
            for step in row["misc"]["gold_trajectory"]:
                item, times = step["target"]
                way = {
                    "from": {part: count // times for part, count in step["ingredients"].items()},
                    "makes": step["result_count"] // times,
                }
                if way not in book[item]:
                    book[item].append(way)
    return dict(book)
