"""Tools that the synthetic chats declare and call, with what users say, what the tools return, and the last sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recipes.kimi_tiny.words import (
    CITIES,
    CURRENCIES,
    LANGUAGES,
    PEOPLE,
    ROOMS,
    SKIES,
    THINGS,
    TOPICS,
    Words,
    draw,
    made_up,
)

Draw = Callable[[np.random.Generator, Words], Any]


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool.

    Attributes:
        kind: its JSON type: string, integer, number or boolean.
        description: for the schema.
        draw: makes a value; its second argument says from which words.
        choices: the legal values, where there is a list.
        spoken: how a user says a value, where that isn't the value itself.
    """

    kind: str
    description: str
    draw: Draw
    choices: tuple[str, ...] = ()
    spoken: dict[Any, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tool:
    """A tool.

    Attributes:
        name: of the function.
        description: for the schema.
        parameters: all are required.
        requests: what users say; {name} stands for an argument.
        result: JSON that the tool returns, from the arguments and a generator.
        answer: the assistant's sentence; {name} stands for an argument or a field of the result.
    """

    name: str
    description: str
    parameters: dict[str, Parameter]
    requests: tuple[str, ...]
    result: Callable[[np.random.Generator], dict[str, Any]]
    answer: str

    @property
    def declaration(self) -> dict[str, Any]:
        """The tool as `Kimi.chat(tools=...)` takes it."""
        properties = {
            key: {
                "type": parameter.kind,
                "description": parameter.description,
                **({"enum": list(parameter.choices)} if parameter.choices else {}),
            }
            for key, parameter in self.parameters.items()
        }
        schema = {"type": "object", "properties": properties, "required": sorted(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }

    def arguments(self, rng: np.random.Generator, words: Words) -> dict[str, Any]:
        """Arguments of one call, in the order of their names, as the declaration shows them.

        For the evaluation, words and amounts are new, and so is the combination, where all values come from lists.
        """
        return draw(
            lambda: {key: self.parameters[key].draw(rng, words) for key in sorted(self.parameters)},
            heldout=words.heldout,
        )

    def request(self, arguments: dict[str, Any], rng: np.random.Generator) -> str:
        """What a user says to have the tool called with these arguments."""
        spoken = {key: self.parameters[key].spoken.get(value, value) for key, value in arguments.items()}
        return self.requests[rng.integers(len(self.requests))].format(**spoken)


def _one_of(choices: Sequence[str]) -> Draw:
    # Of a closed list everything is seen in training: only free values can be new.
    return lambda rng, words: choices[int(rng.integers(len(choices)))]


def _integer(low: int, high: int) -> Draw:
    return lambda rng, words: int(rng.integers(low, high + 1))


def _amount(rng: np.random.Generator, words: Words) -> float | int:
    def make() -> float | int:
        cents = int(rng.integers(100, 100_000))
        return cents / 100 if cents % 3 else cents // 100

    return draw(make, heldout=words.heldout)


def _boolean(rng: np.random.Generator, words: Words) -> bool:
    return bool(rng.integers(2))


def _person(rng: np.random.Generator, words: Words) -> str:
    return words.made_up(rng) if rng.random() < 0.4 else words.of(rng, PEOPLE)


def _city(rng: np.random.Generator, words: Words) -> str:
    return words.made_up(rng) if rng.random() < 0.4 else words.of(rng, CITIES)


def _thing(rng: np.random.Generator, words: Words) -> str:
    # Words that nobody knows keep a model from learning the list by heart instead of copying.
    return _unknown(rng, words) if rng.random() < 0.3 else words.of(rng, THINGS)


def _unknown(rng: np.random.Generator, words: Words) -> str:
    # Training keeps away from both spellings; the evaluation needs only this one to be new.
    def make() -> str:
        return (made_up(rng, heldout=None) if words.heldout else words.made_up(rng)).lower()

    return draw(make, heldout=words.heldout)


def _topic(rng: np.random.Generator, words: Words) -> str:
    def make() -> str:
        topic = _unknown(rng, words) if rng.random() < 0.3 else words.of(rng, TOPICS)
        return (f"history of {topic}", topic, f"facts about {topic}", f"books about {topic}")[rng.integers(4)]

    return draw(make, heldout=words.heldout)


def _song(rng: np.random.Generator, words: Words) -> str:
    def make() -> str:
        topic, thing = words.of(rng, TOPICS).capitalize(), words.of(rng, THINGS).capitalize()
        return (f"{topic} and {thing}", f"Song of the {topic}", f"{topic} in {_city(rng, words)}")[rng.integers(3)]

    return draw(make, heldout=words.heldout)


def _message(rng: np.random.Generator, words: Words) -> str:
    def make() -> str:
        forms = (
            "I will be {n} minutes late",
            "please bring the {thing}",
            "dinner is at {n}",
            "meet me in {city}",
            "the train to {city} leaves at {n}",
            "I have bought the {thing}",
            "happy birthday",
            "{person} is here",
            "we need more {thing}",
            "call me when you are in {city}",
            "{person} says hello",
        )
        return forms[rng.integers(len(forms))].format(
            n=rng.integers(1, 60), thing=_thing(rng, words), city=_city(rng, words), person=_person(rng, words)
        )

    return draw(make, heldout=words.heldout)


def _sentence(rng: np.random.Generator, words: Words) -> str:
    def make() -> str:
        forms = (
            "good morning",
            "where is the station",
            "I like {thing}",
            "the {thing} are on the table",
            "my name is {person}",
            "how far is it to {city}",
            "thank you, {person}",
            "I live in {city}",
        )
        return forms[rng.integers(len(forms))].format(
            thing=_thing(rng, words), city=_city(rng, words), person=_person(rng, words)
        )

    return draw(make, heldout=words.heldout)


def _title(rng: np.random.Generator, words: Words) -> str:
    def make() -> str:
        person = _person(rng, words)
        forms = (f"lunch with {person}", f"visit to {_city(rng, words)}", f"meeting with {person}", f"call {person}")
        return forms[rng.integers(len(forms))]

    return draw(make, heldout=words.heldout)


def _date(rng: np.random.Generator, words: Words) -> str:
    def make() -> str:
        return f"20{rng.integers(24, 32)}-{rng.integers(1, 13):02d}-{rng.integers(1, 29):02d}"

    return draw(make, heldout=words.heldout)


def _time(rng: np.random.Generator, words: Words) -> str:
    return f"{rng.integers(7, 23):02d}:{5 * rng.integers(12):02d}"


def _restaurant(rng: np.random.Generator, words: Words) -> str:
    return f"{words.made_up(rng)} {('Inn', 'House', 'Garden', 'Kitchen')[rng.integers(4)]}"


def _parcel(rng: np.random.Generator, words: Words) -> str:
    def make() -> str:
        letters = "".join("ABCDEFGHJKLMNPRSTUVWXYZ"[i] for i in rng.integers(23, size=2))
        return f"{letters}{rng.integers(10_000, 1_000_000)}"

    return draw(make, heldout=words.heldout)


TOOLS = (
    Tool(
        "get_weather",
        "Weather of a city today.",
        {
            "city": Parameter("string", "name of the city", _city),
            "unit": Parameter(
                "string", "unit of temperature", _one_of(("celsius", "fahrenheit")), ("celsius", "fahrenheit")
            ),
        },
        (
            "What is the weather in {city} in {unit}?",
            "How warm is it in {city}? Use {unit}.",
            "Tell me today's weather in {city}, please, in {unit}.",
            "I am going to {city}. Will it rain? I want {unit}.",
            "Weather for {city} ({unit})",
        ),
        lambda rng: {"sky": SKIES[rng.integers(len(SKIES))], "temperature": int(rng.integers(-9, 40))},
        "It is {sky} in {city}, {temperature} degrees {unit}.",
    ),
    Tool(
        "convert_currency",
        "Converts an amount of money.",
        {
            "amount": Parameter("number", "amount of money", _amount),
            "source": Parameter("string", "currency code", _one_of(CURRENCIES), CURRENCIES),
            "target": Parameter("string", "currency code", _one_of(CURRENCIES), CURRENCIES),
        },
        (
            "How much is {amount} {source} in {target}?",
            "Convert {amount} {source} to {target}.",
            "I have {amount} {source}. What is that in {target}?",
            "Please change {amount} {source} into {target}.",
        ),
        lambda rng: {"converted": int(rng.integers(100, 99_999)) / 100},
        "{amount} {source} are {converted} {target}.",
    ),
    Tool(
        "send_message",
        "Sends a text message to a person.",
        {
            "to": Parameter("string", "name of the person", _person),
            "text": Parameter("string", "text of the message", _message),
        },
        (
            'Send {to} the message "{text}".',
            'Tell {to}: "{text}"',
            'Write to {to} "{text}", please.',
            'Please text {to} "{text}".',
            'Message for {to}: "{text}"',
        ),
        lambda rng: {"sent": True},
        "I have sent your message to {to}.",
    ),
    Tool(
        "search_web",
        "Searches the web.",
        {
            "query": Parameter("string", "words to search for", _topic),
            "max_results": Parameter("integer", "largest number of results", _integer(1, 20)),
        },
        (
            "Search the web for {query} and give me {max_results} results.",
            "Find {max_results} pages about {query}.",
            "Look up {query}. {max_results} results are enough.",
            "I want {max_results} results for {query}.",
        ),
        lambda rng: {"found": int(rng.integers(1, 21))},
        "I found {found} pages about {query}.",
    ),
    Tool(
        "set_timer",
        "Sets a timer with a label.",
        {
            "label": Parameter("string", "what the timer is for", _thing),
            "minutes": Parameter("integer", "minutes until it rings", _integer(1, 180)),
        },
        (
            "Set a timer of {minutes} minutes for the {label}.",
            "Timer for {label}: {minutes} minutes.",
            "Remind me of the {label} in {minutes} minutes.",
            "The {label} need {minutes} minutes. Set a timer.",
        ),
        lambda rng: {"started": True},
        "The timer for the {label} rings in {minutes} minutes.",
    ),
    Tool(
        "create_event",
        "Puts an event into the calendar.",
        {
            "date": Parameter("string", "date as YYYY-MM-DD", _date),
            "time": Parameter("string", "time as HH:MM", _time),
            "title": Parameter("string", "title of the event", _title),
        },
        (
            'Put "{title}" into my calendar on {date} at {time}.',
            'Create an event "{title}" on {date} at {time}.',
            'Add "{title}" to the calendar: {date}, {time}.',
            'On {date} at {time} I have "{title}". Please note it.',
        ),
        lambda rng: {"id": int(rng.integers(1000, 10_000))},
        '"{title}" is in your calendar on {date} at {time}.',
    ),
    Tool(
        "play_music",
        "Plays a piece of music.",
        {
            "shuffle": Parameter(
                "boolean",
                "whether the order is random",
                _boolean,
                spoken={True: "with shuffle", False: "without shuffle"},
            ),
            "title": Parameter("string", "title of the song", _song),
        },
        (
            'Play "{title}" {shuffle}.',
            'I want to hear "{title}" {shuffle}.',
            'Please put on "{title}" {shuffle}.',
            'Start the song "{title}", {shuffle}.',
        ),
        lambda rng: {"playing": True},
        'Now playing "{title}".',
    ),
    Tool(
        "set_light",
        "Switches the light of a room.",
        {
            "brightness": Parameter("integer", "brightness from 1 to 100", _integer(1, 100)),
            "on": Parameter("boolean", "whether the light is on", _boolean, spoken={True: "on", False: "off"}),
            "room": Parameter("string", "the room", _one_of(ROOMS), ROOMS),
        },
        (
            "Turn the light in the {room} {on}, brightness {brightness}.",
            "Light in the {room}: {on}, {brightness} percent.",
            "Please switch the {room} light {on} with brightness {brightness}.",
        ),
        lambda rng: {"done": True},
        "The light in the {room} is set.",
    ),
    Tool(
        "translate",
        "Translates a text.",
        {
            "language": Parameter("string", "language to translate into", _one_of(LANGUAGES), LANGUAGES),
            "text": Parameter("string", "text to translate", _sentence),
        },
        (
            'Translate "{text}" into {language}.',
            'How do I say "{text}" in {language}?',
            'What is "{text}" in {language}?',
            'Please give me the {language} for "{text}".',
        ),
        lambda rng: {"translation": made_up(rng, heldout=False).lower()},
        'In {language} it is "{translation}".',
    ),
    Tool(
        "book_table",
        "Books a table in a restaurant.",
        {
            "people": Parameter("integer", "number of people", _integer(1, 12)),
            "restaurant": Parameter("string", "name of the restaurant", _restaurant),
            "time": Parameter("string", "time as HH:MM", _time),
        },
        (
            "Book a table for {people} at {restaurant} at {time}.",
            "We are {people} and want to eat at {restaurant} at {time}.",
            "Reserve a table at {restaurant} for {people} people, {time}.",
            "Please get us a table at {restaurant} at {time}, {people} people.",
        ),
        lambda rng: {"table": int(rng.integers(1, 40))},
        "You have table {table} at {restaurant} at {time}.",
    ),
    Tool(
        "add_to_list",
        "Adds something to the shopping list.",
        {
            "item": Parameter("string", "what to buy", _thing),
            "quantity": Parameter("integer", "how many or how much", _integer(1, 50)),
        },
        (
            "Add {quantity} {item} to my shopping list.",
            "We need {quantity} {item}. Put them on the list.",
            "Put {quantity} {item} on the shopping list.",
            "Shopping list: {quantity} {item}",
        ),
        lambda rng: {"entries": int(rng.integers(1, 30))},
        "Your list has {entries} entries now, with {quantity} {item}.",
    ),
    Tool(
        "track_parcel",
        "Says where a parcel is.",
        {"number": Parameter("string", "number of the parcel", _parcel)},
        (
            "Where is my parcel {number}?",
            "Track parcel {number}.",
            "Please look where {number} is.",
            "Has {number} arrived?",
        ),
        lambda rng: {"place": CITIES.draw(rng, heldout=False)},
        "Your parcel {number} is in {place}.",
    ),
)
