"""Words for the synthetic chats, and which of them are kept for the evaluation.

A word or a combination of words is held out when the CRC-32 of its UTF-8 bytes is a multiple of `HELDOUT_ONE_IN`.
Training draws only the others and the evaluation only these, so the two can't meet, whatever their seeds.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

HELDOUT_ONE_IN = 8

Value = TypeVar("Value")


def is_heldout(text: str) -> bool:
    """Whether a word or a combination is kept for the evaluation."""
    return zlib.crc32(text.encode()) % HELDOUT_ONE_IN == 0


def draw(make: Callable[[], Value], *, heldout: bool | None) -> Value:
    """Calls `make` until what it returns, as text, is on the wanted side; None: on any."""
    while True:
        value = make()
        if heldout is None or is_heldout(str(value)) == heldout:
            return value


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class Pool:
    """A list of words in its two parts.

    Raises:
        ValueError: a part is empty, or a word comes twice.
    """

    def __init__(self, words: Sequence[str]):
        self.words = tuple(words)
        self._parts = {side: tuple(word for word in self.words if is_heldout(word) == side) for side in (False, True)}
        if not all(self._parts.values()) or len(set(self.words)) < len(self.words):
            raise ValueError(f"The pool {self.words[:3]}... needs different words on both sides of the split.")

    def draw(self, rng: np.random.Generator, *, heldout: bool) -> str:
        """One word of the training part or of the held-out part."""
        words = self._parts[heldout]
        return words[rng.integers(len(words))]


@dataclass(frozen=True)
class Words:
    """Where the free values of a chat come from.

    Attributes:
        heldout: for the evaluation, from words that training never draws.
        vocabulary: words in small letters that take the place of a quarter of the others in training: who has copied every
            word there is copies new ones too. None of them may be held out, however it's spelled.
    """

    heldout: bool
    vocabulary: tuple[str, ...] = ()

    def of(self, rng: np.random.Generator, pool: Pool) -> str:
        """A word of a list, or of the vocabulary with a capital letter where the list has them."""
        if self._any(rng):
            word = self.vocabulary[rng.integers(len(self.vocabulary))]
            return word.capitalize() if pool.words[0][0].isupper() else word
        return pool.draw(rng, heldout=self.heldout)

    def made_up(self, rng: np.random.Generator) -> str:
        """A name that no list has."""
        if self._any(rng):
            return self.vocabulary[rng.integers(len(self.vocabulary))].capitalize()
        return made_up(rng, heldout=self.heldout)

    def _any(self, rng: np.random.Generator) -> bool:
        return bool(self.vocabulary) and not self.heldout and rng.random() < 0.25


def _pool(text: str) -> Pool:
    return Pool(_words(text))


_ONSETS = _words("b br c ch d dr f fl g gr h j k l m n p pr qu r s sh st t tr v w z")
_VOWELS = _words("a e i o u ai ea ee oo")
_ENDS = _words("l n r s t m nd rt x th")


def made_up(rng: np.random.Generator, *, heldout: bool | None) -> str:
    """A name that no list has, such as Dranoo or Flishea: what copies it must copy letters."""

    def make() -> str:
        parts = rng.integers(2**31, size=6)
        word = "".join(_ONSETS[a % len(_ONSETS)] + _VOWELS[b % len(_VOWELS)] for a, b in parts[:4].reshape(2, 2))
        return (word + (_ENDS[parts[4] % len(_ENDS)] if parts[5] % 2 else "")).capitalize()

    return draw(make, heldout=heldout)


ADJECTIVES = _words(
    "amber ancient azure bold brave bright bronze calm clever cold copper crimson curious dark eager early fair fierce "
    "gentle glad golden grand green grey happy hidden hollow humble icy ivory jolly keen kind lazy little lonely loud "
    "lucky merry mighty misty modest narrow noble northern old patient pale proud purple quick quiet rapid red royal "
    "rusty scarlet secret shy silent silver simple sleepy slow small smooth snowy solemn southern swift tall tender "
    "tiny violet wandering warm western white wicked wild wise wooden yellow young"
)
ANIMALS = _words(
    "ant badger bear beaver bee bison boar bull camel cat cow crab crane crow deer dog dolphin donkey dove dragon duck "
    "eagle eel elephant elk falcon ferret finch fox frog goat goose hare hawk hedgehog hen heron horse hound ibis jackal "
    "jay lamb lark lion lizard lynx magpie mole monkey moose mouse mule newt otter owl ox panther parrot peacock pelican "
    "pheasant pig pigeon pony quail rabbit ram rat raven robin salmon seal shark sheep snail snake sparrow spider "
    "squirrel stag stork swallow swan tiger toad trout turtle whale wolf wren"
)
PASSWORDS = _words(
    "anchor apple arrow autumn barley basket bell blanket bottle bread bridge bucket butter button candle carpet castle "
    "chain chimney cloud coffee corner cotton cradle curtain dinner doctor engine evening feather fiddle flower forest "
    "garden ginger glove hammer harbour hazel hedge honey island jacket kettle kitchen ladder lantern leather lemon "
    "letter linen marble market meadow mirror morning mountain needle orange oven paper pepper pillow pocket potato "
    "powder ribbon river saddle sailor shadow shepherd shovel shower spoon summer table temple thunder ticket timber "
    "valley velvet village window winter wagon water"
)

PEOPLE = _pool(
    "Ada Agnes Albert Alice Amos Anna Arthur Beatrice Ben Bertha Carl Cecilia Charles Clara Clement Daisy Daniel David "
    "Diana Dora Edgar Edith Edmund Eleanor Elias Eliza Ella Emil Emma Ernest Esther Eva Felix Flora Frances Frank "
    "Frederick George Gertrude Gilbert Grace Hannah Harold Harriet Harry Helen Henry Herbert Hugo Ida Irene Isaac Isabel "
    "Ivan Jack Jacob James Jane Jasper John Jonas Joseph Judith Julia Karl Kate Laura Leo Lewis Lily Louis Lucas Lucy "
    "Lydia Mabel Magnus Margaret Maria Martha Martin Mary Matthew Maud Max Michael Miriam Nathan Nell Nicholas Nina Noah "
    "Nora Oliver Olga Oscar Otto Paul Peter Philip Rachel Ralph Robert Rosa Ruth Samuel Sarah Simon Sophia Stephen Susan "
    "Sylvia Theodore Thomas Tobias Ursula Victor Viola Walter William Winifred"
)
CITIES = _pool(
    "Aberdeen Algiers Amsterdam Antwerp Athens Baltimore Bangkok Barcelona Basel Beirut Belfast Berlin Bern Bilbao "
    "Bogota Bologna Boston Bremen Bristol Brussels Bucharest Budapest Cairo Calais Cambridge Canton Cardiff Chicago "
    "Cologne Copenhagen Cork Dakar Dallas Delhi Denver Dover Dresden Dublin Durban Edinburgh Florence Frankfurt Geneva "
    "Genoa Ghent Glasgow Granada Halifax Hamburg Hanoi Havana Helsinki Istanbul Jakarta Jerusalem Karachi Krakow Kyoto "
    "Lagos Leeds Leipzig Lima Lisbon Liverpool London Lyon Madrid Malaga Manchester Manila Marseille Melbourne Memphis "
    "Milan Montreal Moscow Munich Nairobi Naples Nice Oslo Ottawa Oxford Palermo Paris Perth Plymouth Porto Prague "
    "Quebec Riga Rome Rotterdam Salzburg Santiago Seattle Seoul Seville Shanghai Singapore Sofia Stockholm Sydney Tokyo "
    "Toronto Trieste Tunis Turin Utrecht Valencia Venice Verona Vienna Warsaw York Zagreb Zurich"
)
THINGS = _pool(
    "almonds apples apricots bacon bananas batteries beans beets biscuits bread brushes butter cabbage candles carrots "
    "cheese cherries chocolate cloves coffee corn cream cucumbers dates eggs envelopes figs fish flour garlic ginger "
    "grapes ham honey jam lamps leeks lemons lentils lettuce matches melons milk mint mushrooms mustard nails noodles "
    "nuts oats oil olives onions oranges paint paper parsley peaches pears peas pencils pepper plums potatoes pumpkins "
    "radishes raisins rice ropes rye salad salt sausages soap spinach sponges stamps sugar syrup tea thread tomatoes "
    "towels turnips vinegar walnuts wine wool yeast"
)
TOPICS = _pool(
    "astronomy bakers barns beetles bells boats bridges butterflies canals castles caves chess clocks clouds coins "
    "comets compasses coral cotton deserts diamonds dreams drums earthquakes engines farming feathers fishing flags "
    "flutes forests fossils foxes frost gardens geese glaciers glass harbours hats helmets herbs horses hurricanes "
    "insects islands ivory kites knots ladders lakes lanterns lighthouses lightning lions locks magnets mammals maps "
    "marble meteors mills mirrors moss mountains music needles oceans opera orchards owls painting paper pearls "
    "penguins pianos pirates planets poetry pottery pyramids rain rivers roses sailing salt sculpture seeds sharks "
    "sheep silk snow spiders spoons stars storms sundials swimming thunder tides trains trees tunnels violins volcanoes "
    "whales wheat windmills wolves"
)
ROOMS = ("attic", "bathroom", "bedroom", "cellar", "garage", "hall", "kitchen", "library", "office", "study")
LANGUAGES = ("Danish", "Dutch", "French", "German", "Greek", "Italian", "Latin", "Polish", "Spanish", "Swedish")
CURRENCIES = ("AUD", "CAD", "CHF", "CNY", "EUR", "GBP", "INR", "JPY", "NOK", "USD")
SKIES = ("clear", "cloudy", "foggy", "rainy", "snowy", "stormy", "sunny", "windy")
NOUNS = _words(
    "aunt baby battle bear bird boat boy brother captain castle cat child church daughter devil doctor dog dragon "
    "father fish forest fox friend garden ghost giant girl goose grandmother horse house hunter island judge king "
    "knight lady lion mill miller money mother mouse night ocean man peasant priest prince princess queen rabbit "
    "river sailor school sea servant sheep ship sister snow soldier son storm summer tailor teacher thief tree village "
    "wedding whale wife winter witch wolf woman wood"
)
