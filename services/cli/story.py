"""The text of the demo's conversation: one long opening that several questions share. Ours, written for this file."""

SYSTEM = "You are a storyteller."

OPENING = """\
Once upon a time there lived at the edge of a great forest an old clockmaker and his granddaughter Marit. The house was \
small and crooked, but in every room a clock was ticking, and when the hour struck they all struck together, so that the \
travellers on the road stood still and counted. People brought their watches from far away, and the old man mended them \
all, and took for it what each could give: a loaf, a hen, or only a song.

One winter the snow fell for nine days without a rest. On the tenth day somebody knocked at the door, and when Marit \
opened it, there stood a tall man in a grey coat, with a wooden box under his arm. He stamped the snow from his boots, sat \
down by the fire, and said that he had walked from the sea. "In this box," said he, "is a clock that my mother left me. It \
has never been wound, and yet it has never stopped. But since the first snow it goes backwards, and everything in my \
house goes backwards with it. The milk turns into grass, the fire turns into wood, and my children are growing smaller \
every day. If you cannot mend it before the spring, there will be nobody left to thank you."

The old man opened the box. The clock was no larger than an apple. Its face was white, its hands were of silver, and it \
made no more noise than a cat in the straw. He looked at it for a long time through his glass, and shook his head. \
"There is nothing broken in it," said he. "It is afraid of something. A clock that is afraid cannot be mended with a \
file. Somebody must carry it back to the place where it was made, and show it that the place is still there."

"And where was it made?" asked Marit.

"In the middle of the forest," said the tall man, "in a house without a door. My mother was born there. But she never \
told me the way, and the wolves know it better than I do."

Then the old man was silent, for he could no longer walk so far. But Marit took down her cloak from the nail, put bread \
and cheese into her pocket, and wrapped the clock in a warm cloth. "I am small," said she, "and where there is no door, \
one who is small may find a window." Her grandfather kissed her, and gave her the little hammer with which he had made \
his first clock, and she went out into the snow."""

FIRST = f"Continue this story: {OPENING}"
FOLLOW_UP = "What happened next?"
SIBLING = f"{FIRST} Before long she met a fox, who was sitting on a stone in the middle of the path."
SECOND_SIBLING = f"{FIRST} When the evening came, she saw a light far away between the trees."
