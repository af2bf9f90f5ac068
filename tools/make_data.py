"""Make the sentence pairs and the tokenizer of zero1_helpers/data; the same bytes on every run.

    python tools/make_data.py            # writes paraphrases.jsonl and tokenizer.json
    python tools/make_data.py --check    # only says whether the shipped files are these

A topic is a handful of facts and some sentences that tell them. Two sentences about the same facts
are a paraphrase (label 1). Change one fact in the second and they are not (label 0). A fact is a
tuple of wordings that mean the same; `[a|b]` in a sentence is a choice between wordings.
All names and all facts are invented.
"""

import argparse
import json
import os
import random
import re
import sys
from pathlib import Path

SEED = 314
TRAIN, VALIDATION = 640, 128  # pairs; two thirds are paraphrases, as in MRPC
VOCAB_SIZE = 1024
SPECIAL_TOKENS = ["<unk>", "<sep>", "<pad>"]  # the pad id is 2, as in SmolLM2
DATA = Path(__file__).resolve().parent.parent / "zero1_helpers" / "data"

CITIES = [
    "Harwick",
    "Port Elin",
    "Moorfield",
    "Westbrae",
    "Carrow",
    "Lindale",
    "Stonebridge",
    "Nerva",
]
PEOPLE = [
    "Mara Lindqvist",
    "Tomas Okoye",
    "Irene Castell",
    "Jonas Weir",
    "Priya Nandan",
    "Samuel Brandt",
    "Lucia Ferro",
    "Hana Mori",
    "Peter Aldous",
    "Nadia Rahman",
]
FIRMS = [
    "Northgate Foods",
    "Calder Steel",
    "Brightwell Energy",
    "Ostara Shipping",
    "Fenwick Labs",
    "Halden Motors",
    "Juniper Telecom",
    "Redmoor Paper",
]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
NUMBERS = dict(enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2))


class Dice:
    """Random choices from random() alone, the one method whose sequence Python guarantees."""

    def __init__(self, seed: int):
        self.random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self.random() * n)

    def pick(self, options):
        return options[self.below(len(options))]

    def shuffle(self, items: list) -> None:
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]


# Facts: each draws one value, a tuple of wordings.
def one_of(*options):
    options = [option if isinstance(option, tuple) else (option,) for option in options]
    return lambda dice: dice.pick(options)


def date(dice):
    day, month = 1 + dice.below(28), dice.pick(MONTHS)
    return f"{month} {day}", f"{day} {month}"


def small(low, high):
    def draw(dice):
        n = low + dice.below(high - low + 1)
        return (NUMBERS[n], str(n)) if n in NUMBERS else (str(n),)

    return draw


def number(low, high, step=1, form=","):
    return lambda dice: (format(low + step * dice.below((high - low) // step + 1), form),)


def percent(dice):
    n = 2 + dice.below(40)
    return f"{n} percent", f"{n}%", f"{n} per cent"


def money(dice):
    n = 2 + dice.below(90)
    return f"${n} million", f"{n} million dollars"


city, person, firm = one_of(*CITIES), one_of(*PEOPLE), one_of(*FIRMS)
year = number(1990, 2024, form="d")

# Topic: its facts, and the sentences that tell all of them.
TOPICS = [
    (
        {
            "firm": firm,
            "way": one_of(("rose", "climbed", "went up"), ("fell", "dropped", "went down")),
            "pct": percent,
            "quarter": one_of(*(f"{q} quarter" for q in "first second third".split())),
        },
        [
            "{firm} said its [profit|earnings] {way} {pct} in the {quarter}.",
            "In the {quarter}, the [profit|earnings] of {firm} {way} by {pct}.",
            "[Profit|Earnings] at {firm} {way} {pct} in the {quarter}, the company [said|reported].",
            "The company {firm} [reported|announced] that {quarter} [profit|earnings] {way} {pct}.",
        ],
    ),
    (
        {
            "home": one_of(*CITIES[:4]),
            "away": one_of(*CITIES[4:]),
            "who": person,
            "date": date,
            "score": one_of("2-1", "3-0", "1-0", "4-2", "3-1"),
        },
        [
            "{home} beat {away} {score} on {date}, with the [first|opening] goal from {who}.",
            "{away} lost {score} to {home} on {date} after {who} [scored|struck] first.",
            "{who} scored [first|the opening goal] as {home} [defeated|beat] {away} {score} on {date}.",
            "On {date}, {away} were beaten {score} by {home}, and {who} scored first.",
        ],
    ),
    (
        {
            "city": city,
            "yes": small(7, 12),
            "no": small(2, 6),
            "plan": one_of(
                "a new bus station",
                "a ban on night flights",
                "a larger library",
                "a free school bus",
                "a tax on empty homes",
            ),
        },
        [
            "The {city} council voted {yes} to {no} for {plan}.",
            "{plan} was [approved|backed] by the {city} council, {yes} votes to {no}.",
            "By {yes} votes to {no}, councillors in {city} [approved|backed] {plan}.",
            "Councillors in {city} voted for {plan}, with {yes} in favour and {no} against.",
        ],
    ),
    (
        {
            "city": city,
            "mm": number(40, 160, 5),
            "homes": number(200, 9000, 100),
            "day": one_of("Monday", "Tuesday", "Friday", "Sunday"),
        },
        [
            "A storm [dropped|brought] {mm} millimetres of rain on {city} on {day} and left {homes} homes"
            " without power.",
            "On {day}, {mm} millimetres of rain fell [on|in] {city}, and {homes} homes lost power.",
            "{homes} homes in {city} lost power on {day} when a storm brought {mm} millimetres of rain.",
            "Power was cut to {homes} homes in {city} on {day} as {mm} millimetres of rain fell.",
        ],
    ),
    (
        {
            "who": person,
            "what": one_of(*"frog moth beetle bat fern crab".split()),
            "where": one_of("a cave", "a salt lake", "a cloud forest", "a river delta"),
            "year": year,
        },
        [
            "{who} [discovered|found] a new species of {what} in {where} in {year}.",
            "A new {what} species was [discovered|found] by {who} in {where} in {year}.",
            "In {year}, {who} [described|found] a {what} from {where} that was new to science.",
            "The {what}, unknown to science until {year}, was found in {where} by {who}.",
        ],
    ),
    (
        {
            "who": person,
            "years": small(2, 12),
            "city": city,
            "crime": one_of("fraud", ("theft", "stealing"), "arson", ("bribery", "taking bribes")),
        },
        [
            "A judge in {city} [sentenced|condemned] {who} to {years} years in prison for {crime}.",
            "{who} was [jailed|imprisoned] for {years} years for {crime} by a court in {city}.",
            "For {crime}, {who} must [spend|serve] {years} years in prison, a {city} court ruled.",
            "A {city} court [gave|handed] {who} a prison term of {years} years for {crime}.",
        ],
    ),
    (
        {
            "a": one_of(*CITIES[:4]),
            "b": one_of(*CITIES[4:]),
            "min": number(35, 95, 5),
            "cost": money,
        },
        [
            "The new railway [between {a} and {b}|from {a} to {b}] cost {cost} and takes {min} minutes.",
            "Trains now [run|travel] from {a} to {b} in {min} minutes on a line that cost {cost}.",
            "It takes {min} minutes from {a} to {b} on the new line, which was built for {cost}.",
            "A railway built for {cost} [links|connects] {a} with {b} in {min} minutes.",
        ],
    ),
    (
        {
            "city": city,
            "who": person,
            "price": money,
            "what": one_of("portrait", "landscape", "sculpture", "drawing"),
        },
        [
            "The {city} museum [bought|acquired] a {what} by {who} for {price}.",
            "A {what} by {who} was [bought|acquired] by the museum in {city} for {price}.",
            "For {price}, the museum of {city} has [bought|acquired] a {what} by {who}.",
            "The museum in {city} paid {price} for a {what} [made by|by] {who}.",
        ],
    ),
    (
        {
            "n": number(20, 400, 10),
            "city": city,
            "where": one_of("hotel", "school", "factory", "theatre"),
            "when": one_of("midnight", ("noon", "midday"), ("dawn", "sunrise")),
        },
        [
            "About {n} people were [evacuated|moved] from a {where} in {city} after a fire at {when}.",
            "A fire at {when} forced [about|around] {n} people to leave a {where} in {city}.",
            "At {when}, a fire broke out in a {city} {where}, and [about|some] {n} people had to leave.",
            "[About|Around] {n} people had to leave a {where} in {city} when it caught fire at {when}.",
        ],
    ),
    (
        {
            "firm": firm,
            "n": number(300, 4000, 100),
            "pct": percent,
            "ill": one_of("asthma", "migraine", ("flu", "influenza"), "back pain"),
        },
        [
            "A drug from {firm} [cut|reduced] cases of {ill} by {pct} in a trial with {n} patients.",
            "In a trial with {n} patients, a {firm} drug [reduced|lowered] {ill} by {pct}.",
            "{firm} tested a drug on {n} patients and saw {pct} [fewer cases of|less] {ill}.",
            "There was {pct} less {ill} among {n} patients who [took|were given] a drug by {firm}.",
        ],
    ),
    (
        {
            "firm": firm,
            "what": one_of("phone", "tablet", "camera", ("laptop", "notebook computer")),
            "price": number(199, 1299, 50),
            "date": date,
        },
        [
            "{firm} will [launch|release] a {what} for ${price} on {date}.",
            "A {what} that costs ${price} will be [launched|released] by {firm} on {date}.",
            "On {date}, {firm} will [start|begin] to sell a {what} at ${price}.",
            "The {what} from {firm} [comes out|goes on sale] on {date} and costs ${price}.",
        ],
    ),
    (
        {
            "crop": one_of("wheat", "barley", "maize", "rice"),
            "city": city,
            "tons": number(100, 900, 10),
            "way": one_of("more", "less"),
            "year": year,
        },
        [
            "Farmers near {city} [cut|harvested] {tons} tonnes of {crop} in {year}, {way} than usual.",
            "In {year} the {crop} harvest near {city} was {tons} tonnes, {way} than usual.",
            "At {tons} tonnes, the {crop} harvest of {year} near {city} was {way} than usual.",
            "The {crop} harvest near {city} [reached|was] {tons} tonnes in {year}, {way} than usual.",
        ],
    ),
    (
        {
            "who": person,
            "city": city,
            "h": small(2, 4),
            "m": number(11, 58),
            "race": one_of("marathon", "cycling race", "ski race"),
        },
        [
            "{who} won the {city} {race} in {h} hours and {m} minutes.",
            "The {race} in {city} was won by {who} in {h} hours and {m} minutes.",
            "With a time of {h} hours and {m} minutes, {who} [won|came first in] the {city} {race}.",
            "{who} [needed|took] {h} hours and {m} minutes to win the {race} of {city}.",
        ],
    ),
    (
        {
            "firm": firm,
            "n": number(100, 2500, 50),
            "city": city,
            "way": one_of(("hire", "take on", "recruit"), ("dismiss", "lay off", "fire")),
        },
        [
            "{firm} [plans|intends] to {way} {n} workers at its plant in {city}.",
            "At its {city} plant, {firm} [plans|wants] to {way} {n} [people|workers].",
            "{firm} said it would {way} {n} [workers|people] in {city}.",
            "In {city}, the company {firm} is [about|going] to {way} {n} workers.",
        ],
    ),
]


def tell(sentence: str, facts: dict, dice: Dice) -> str:
    text = re.sub(r"\[([^]]*)\]", lambda m: dice.pick(m[1].split("|")), sentence)
    text = re.sub(r"\{(\w+)\}", lambda m: dice.pick(facts[m[1]]), text)
    return text[0].upper() + text[1:]


def make_pair(topic, label: int, dice: Dice) -> tuple[str, str]:
    drawers, sentences = topic
    facts = {name: draw(dice) for name, draw in drawers.items()}
    first = dice.below(len(sentences))
    second = (first + 1 + dice.below(len(sentences) - 1)) % len(sentences)  # never the same one
    one = tell(sentences[first], facts, dice)
    if label == 0:
        name = dice.pick(list(drawers))
        old = facts[name]
        while facts[name] == old:
            facts[name] = drawers[name](dice)
    return one, tell(sentences[second], facts, dice)


def make_rows() -> list[dict]:
    dice = Dice(SEED)
    pairs, seen = [], set()
    while len(pairs) < TRAIN + VALIDATION:
        label = int(len(pairs) % 3 != 0)
        pair = make_pair(TOPICS[len(pairs) % len(TOPICS)], label, dice)
        if pair not in seen:
            seen.add(pair)
            pairs.append((*pair, label))
    dice.shuffle(pairs)
    return [
        {
            "split": "train" if i < TRAIN else "validation",
            "idx": i if i < TRAIN else i - TRAIN,
            "label": label,
            "sentence1": one,
            "sentence2": two,
        }
        for i, (one, two, label) in enumerate(pairs)
    ]


def make_tokenizer(rows: list[dict]) -> str:
    """Byte-level BPE trained on the training pairs; a pair becomes `A <sep> B <sep>`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    train = [row for row in rows if row["split"] == "train"]
    tokenizer.train_from_iterator(
        (row[column] for row in train for column in ("sentence1", "sentence2")), trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <sep>",
        pair="$A <sep> $B <sep>",
        special_tokens=[("<sep>", tokenizer.token_to_id("<sep>"))],
    )
    return tokenizer.to_str(pretty=True) + "\n"


def make_files() -> dict[str, str]:
    rows = make_rows()
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return {"paraphrases.jsonl": lines, "tokenizer.json": make_tokenizer(rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the shipped files only")
    check, stale = parser.parse_args().check, 0
    for name, text in make_files().items():
        path = DATA / name
        if check:
            same = path.is_file() and path.read_text(encoding="utf-8") == text
            stale += not same
            print(f"{name}: {'as made here' if same else 'differs: run tools/make_data.py'}")
        else:
            part = path.with_name(name + ".part")
            part.write_text(text, encoding="utf-8", newline="\n")
            os.replace(part, path)
            print(f"{name}: {len(text):,} characters")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
