"""What the demo's users say. Pure data and its types; knows no model, no network.

Every chat opens with the same system prompt. First turns bring notes that no cache has (low hit rates: relay decode
earns its place); second turns bring a paragraph (little crosses), third turns a line (main decode computes it alone).
"""

from dataclasses import dataclass

from kvrelay.types import HandoffMode, Sampling

SYSTEM = (
    "You are the assistant of a small observatory on a hill above a harbour town. Visitors, teachers and the "
    "night staff write to you. Answer in plain words and short sentences. Say when you do not know something. "
    "Never invent an instrument that the observatory does not have: it has a 40 cm reflector, a pair of large "
    "binoculars on a stand, a radio receiver for meteors, and a weather mast. The dome opens at dusk on clear "
    "nights from Tuesday to Saturday."
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a user, and how its answer is drawn."""

    says: str
    sampling: Sampling
    handoff: HandoffMode = HandoffMode.DYNAMIC
    """Asked of the router; dynamic is its default."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Turns that follow each other, under the shared system prompt."""

    name: str
    turns: tuple[Turn, ...]


LOGBOOK = """Here is the log of the last nights, please read it.
Monday: the dome stayed closed. Rain from the west, gusts up to 70 km/h at the mast, and the heating of the
control room failed at about four in the morning. The electrician came at nine and changed a relay.
Tuesday: clear after ten. A class of twenty pupils saw the double cluster through the binoculars and the rings
of Saturn through the reflector. Two of them asked why the rings have a gap. The meteor receiver counted 41
echoes before midnight and 96 after it, which is more than in any other night of the month.
Wednesday: thin cloud all night. We used the time to clean the finder, to oil the shutter, and to write a new
list of bright objects for people who come with small children. The list now has eighteen entries instead of
thirty.
Thursday: very clear and very cold. The drive of the reflector slipped twice in the east, always at the same
hour angle. After the counterweight was moved by two centimetres it did not slip again. We followed a small
comet for three hours; it is fainter than predicted and has no visible tail. Six visitors, one of whom had come
from the other side of the country.
Friday: fog in the harbour, the hill just above it. The sky was darker than usual, since the fog covered the
town's lights. We could see the band of the winter Milky Way down to the horizon, and the zodiacal light in the
west after dusk.
Saturday: forty visitors, far too many for one telescope. The queue was long, and some people left before they
had a look.
"""

LETTER = """A teacher has written to us. Her letter:
My class of eleven-year-olds would like to come on an evening in the second half of the month. There are twenty-
six of them and three adults. One child uses a wheelchair. Most of them have never seen a telescope from near.
In school we have talked about the phases of the Moon, about why there are seasons, and about the order of the
planets; we have not yet talked about stars, about galaxies or about how far away things are. They have many
questions. Some of them are: does the Moon turn around itself, why do we always see the same side of it, can one
see the flags that people left there, how hot is a star, how do we know what a star is made of if nobody has
been there, what was before the beginning of everything, do stars die, is there air in space, what would happen
to a person without a suit, how do astronauts sleep, and who owns the Moon. We can stay until ten at the latest,
since the bus has to be back by eleven. If the night is cloudy, is there something that we could do inside? We
would also like to know what it costs, whether there is a place where the children can eat the bread they bring
with them, and what they should wear. I remember that the path from the parking place is steep and not lit. Last
time two children were afraid of the dark, so it would be good to know where the toilets are before the lights
go out.
"""

MANUAL = """This is the part of our manual about closing the dome:
First look at the weather mast. If the wind is above 60 km/h, close at once and leave the telescope where it is.
If it is below, park the telescope first: choose Park in the menu, wait for the long tone, and check by eye that
the tube points north and is level. Never trust the tone alone. Then switch off the drive, put the caps on the
main mirror and on the finder, and roll up the cable of the hand box so that nobody can fall over it. Turn the
dome until the two red marks meet. Press the green button and hold it until the shutter is shut; it takes about
forty seconds. If it stops on its way, let go, wait for ten seconds and press again. If it stops for a second
time do not force it: use the crank, which hangs on the wall to the left of the door. It needs ninety turns.
Then switch off the motor's fuse, so that nobody can start the motor while the crank is in it. At the end write
the hour and your name into the book, look whether all the lamps are off, lock the door, and put the key into
the box at the gate. In winter leave the small heater on. If lightning is near, pull all the plugs out of the
wall, including that of the meteor receiver, and do not touch the mast. If you are alone and something is
broken, call the person on duty; the number is written on the inside of the door. It is better to lose a night
than a hand.
"""


def drawn(seed: int, tokens: int, temperature: float = 0.8) -> Sampling:
    """A seeded draw; temperature 0 is greedy."""
    return Sampling(seed=seed, max_tokens=tokens, temperature=temperature, top_p=0.95)


def greedy(tokens: int) -> Sampling:
    """The most likely token each time."""
    return Sampling(seed=0, max_tokens=tokens, temperature=0.0)


FOLLOW_UP = (
    "Thank you. One more thing, since I have to report it on Monday morning to a person who has not read any of "
    "this and does not know the observatory well: take what is above, leave out everything about the weather and "
    "about the people, and tell me in which order I should do things if I have only half an hour and nobody to "
    "help me, what I may safely leave for another day, and what I must not forget in any case. Please begin with "
    "the most important thing, and give a reason for each step so that the other person can follow it without "
    "asking me again."
)

CHATS = (
    Chat(
        "logbook",
        (
            Turn(
                LOGBOOK + "Write a report of the week for the newspaper, night by night, with all that visitors saw.",
                greedy(112),
            ),
            Turn(FOLLOW_UP, drawn(11, 48)),
            Turn("Which of these is the most urgent?", greedy(24)),
        ),
    ),
    Chat(
        "letter",
        (
            Turn(
                LETTER + "Write a friendly letter to her that answers all of her questions, one after the other.",
                drawn(21, 128),
            ),
            Turn(FOLLOW_UP, greedy(48)),
            Turn("Is that all?", drawn(23, 24)),
        ),
    ),
    Chat(
        "manual",
        (
            Turn(
                MANUAL + "Write this again as a numbered list of short steps for a new member.",
                drawn(31, 144),
                HandoffMode.CATCH_UP,  # so that both ways of handing over can be seen
            ),
            Turn(FOLLOW_UP, drawn(32, 48)),
            Turn("And where is the crank?", greedy(24)),
        ),
    ),
)
