"""Words from which seeds.py composes questions. Plain data."""

CHAT_OPENINGS = (
    "What", "What is", "What are", "How", "How do I", "How can", "How many", "Why", "Why do", "When", "Which", "Who",
    "Where", "Can you", "Could you", "Is it", "Tell me", "Give me", "Explain", "Explain how", "Describe", "Write a",
    "Write an", "Suggest", "List", "Name", "Create a", "Generate a", "Compare", "Translate", "Rewrite", "Identify",
    "Edit", "Classify", "Find", "Design a", "Summarize", "I need", "I am", "I want to", "My", "Help me", "Imagine",
    "Convert", "Analyze", "Provide", "Brainstorm", "Arrange", "Construct a sentence", "Make a list of", "Come up with",
    "Write a short story about", "Write a poem about", "Write an email to", "Give three reasons why", "What happens if",
    "Explain the difference between", "Describe the process of", "In one paragraph,", "Pretend that",
)  # fmt: skip
CODE_OPENINGS = (
    "Write a Python function that", "Write a Python function to", "Write a Python program that", "Write a function",
    "Complete this Python function:\ndef ", "Complete this Python function:\nfrom typing import List\n\n\ndef ",
    "Complete this Python function:\n", "Write a Python script", "Write a Python class", "How do I, in Python,",
    "Fix the bug in this code:\n", "What does this Python code do?\n", "Write a SQL query",
    "Write a JavaScript function",
    "Implement", "Explain this code:\n", "Write a unit test for", "Refactor this function:\ndef ",
)  # fmt: skip
MATH_OPENINGS = (
    "Solve", "Calculate", "What is the sum of", "What is the value of", "Find the", "If a train", "A farmer has",
    "A store sells", "A baker makes", "There are", "In a class of", "A car travels", "Each day,", "A recipe calls for",
    "If it takes", "How many", "A tank holds", "Two friends share", "The price of", "A rectangle has",
)  # fmt: skip
RAW_OPENINGS = (
    "The", "In the", "Once upon a time", "Chapter 1\n\n", "Introduction\n\n", "# ", "import ", "def ", "class ", "A ",
    "Abstract\n\n", "Question:", "Q:", "Dear", "There is", "One of the", "It was", "The history of", "Scientists",
    "When the", "Python is", "To make", "from typing import List\n\n\ndef ", "import numpy as np\n\n", "#include <",
    "public class ", "SELECT ", "The following", "Here is", "According to", "In this article,", "Today",
)  # fmt: skip
PASSAGE_OPENINGS = (
    "The", "In recent", "A new", "This document", "For many", "Researchers", "It is", "Since", "Although", "When",
    "The following", "One of", "Many people", "This proposal", "The purpose of", "Currently,", "In Python,", "During",
    "The module", "Over the past", "The idea of", "Several", "A common", "At present", "Users", "The language",
)  # fmt: skip
SUMMARY_REQUESTS = (
    "Summarize: ", "Summarize the following text:\n\n", "Summarize this: ", "Give a short summary of this text:\n",
    "Write a one-paragraph summary.\n\n", "What are the main points of this text?\n\n", "TL;DR of the following: ",
)  # fmt: skip

PEOPLE = (
    "Ana", "Ben", "Chloe", "Diego", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena", "Marta", "Nils",
    "Olga", "Pedro", "Quinn", "Rosa", "Samir", "Tara", "Umar", "Vera", "Wendy", "Yusuf", "Zoe", "Tom", "Lucy", "Mike",
)  # fmt: skip
THINGS = (
    "apples", "marbles", "books", "pencils", "stamps", "cookies", "tickets", "bottles", "shells", "coins", "cards",
    "flowers", "eggs", "toys", "oranges", "boxes", "candles", "stickers", "bricks", "photos", "chairs", "cupcakes",
)  # fmt: skip
PLACES = ("the market", "the fair", "a shop", "school", "the library", "the bakery", "a garage sale", "the harbour")
STORIES = (
    "{a} has {x} {t}. {a} gives {y} of them to {b} and then buys {z} more. How many {t} does {a} have now?",
    "{a} sells {x} {t} a day at {p} for ${y} each. How much money does {a} make in {z} days?",
    "A box holds {x} {t}. {a} fills {y} boxes and has {z} {t} left over. How many {t} are there in all?",
    "{a} reads {x} pages on Monday, twice as many on Tuesday and {y} fewer than Tuesday on Wednesday. "
    "How many pages did {a} read in the three days?",
    "{a} is {x} years older than {b}. In {y} years {b} will be {z}. How old is {a} today?",
    "{t} cost ${x} each. {a} buys {y} of them with a discount of {z}%. How much does {a} pay?",
    "{a} drives {x} miles an hour for {y} hours and then {z} miles more. How far did {a} drive?",
    "{a} and {b} share {x} {t} in the ratio {y}:{z}. How many does {b} get?",
    "{a} saves ${x} every week. After {y} weeks {a} spends ${z} at {p}. How much money is left?",
    "There are {x} {t} in a shop. On Monday {y} are sold, and on Tuesday half of the rest. How many are left?",
    "{a} bakes {x} trays with {y} cookies each. {b} eats {z} of them. If {a} sells the rest for $2 each, "
    "how much does {a} earn?",
    "It takes {a} {x} minutes to paint one fence panel. How many hours does {a} need for {y} panels if {z} of them "
    "are already painted?",
    "A school has {x} classes with {y} pupils each. If {z}% of the pupils walk to school, how many do not walk?",
    "{a} needs {x} {t} for a party. {b} brings {y} and {a} already has {z}. How many are still missing?",
    "{a} earns ${y} an hour and works {z} hours a week. Rent is ${x} a month. What is left after four weeks?",
    "A train leaves with {x} passengers. At the first stop {y} get off and {z} get on. How many are on the train then?",
    "{a} has twice as many {t} as {b}. Together they have {x}. How many {t} does {b} have?",
    "A rectangle is {y} cm wide and {z} cm long. What are its area and its perimeter?",
    "{a} buys {y} {t} for ${z} each and pays with a ${x} bill. How much change does {a} get?",
    "A tank holds {x} litres. It loses {y} litres an hour. How much is left after {z} hours, and when is it empty?",
    "{a} runs {y} miles every day and {b} runs {z} miles every other day. How much further does {a} run in {x} days?",
    "The price of a ticket rises from ${x} by {z}%. {a} buys {y} tickets. How much do they cost now?",
    "A recipe for {y} people needs {x} grams of flour. How much flour is needed for {z} people?",
    "{a} collects {t}. On Monday {a} finds {y}, and each day after that twice as many as the day before. "
    "How many does {a} find in five days?",
    "In a class of {x} pupils, {z}% play football and {y} play chess. How many play football?",
    "{a} and {b} start a shop with ${x} each. They spend ${y} a day for {z} days. How much of their money is left?",
    "{a} fills {x} {t} into bags of {y}. How many full bags are there, and how many {t} are left over?",
    "A book has {x} pages. {a} has read {y} pages a day for {z} days. What fraction of the book is left?",
)

CODE_VERBS = (
    "count", "collect", "rank", "merge", "trim", "shift", "split", "group", "weigh", "scale", "mark", "swap", "pair",
    "flatten", "total", "pick", "drop", "rotate", "chunk", "index", "clip", "bound", "map", "average", "join",
)  # fmt: skip
CODE_NOUNS = (
    "words", "numbers", "scores", "letters", "digits", "rows", "items", "names", "prices", "values", "vowels", "points",
    "tokens", "lines", "grades", "temperatures", "intervals", "columns", "characters", "keys", "codes", "distances",
)  # fmt: skip
CODE_RULES = (
    "that are greater than the first one", "that appear more than once", "in the order in which they were given",
    "whose position is even", "that start with the given prefix", "between the two limits, both included",
    "after removing duplicates", "and ignore everything that is empty", "from the largest to the smallest",
    "that are divisible by three", "with their neighbours", "that are longer than the average", "as a single string",
    "or return None when there is nothing to look at", "and leave the input unchanged", "that are prime",
    "so that equal ones stand together", "whose sum is not zero", "up to the given limit", "in alphabetical order",
)  # fmt: skip
CODE_SHAPES = (
    ("values: List[int]", "int"), ("values: List[int]", "List[int]"), ("text: str", "int"), ("text: str", "str"),
    ("words: List[str]", "List[str]"), ("values: List[float], limit: float", "bool"), ("n: int", "int"),
    ("n: int", "List[int]"), ("a: int, b: int", "int"), ("text: str, prefix: str", "List[str]"), ("n: int", "bool"),
    ("items: List[str], size: int", "List[List[str]]"), ("a: str, b: str", "bool"), ("values", ""), ("a, b", ""),
)  # fmt: skip
SAMPLES = {
    "List[int]": ("[3, 1, 2]", "[]", "[5, -2, 9, 4]", "[1, 1, 2]", "[10, 20, 30, 40]", "[7]"),
    "List[float]": ("[1.5, 2.0, 0.5]", "[0.1, 3.9]", "[2.25, 2.75, 8.0]"),
    "List[str]": ("['sun', 'sea', 'sky']", "['a', 'bb', 'ccc']", "[]", "['red', 'blue', 'red']"),
    "List[List[str]]": ("[['a', 'b'], ['c']]", "[]", "[['x']]"),
    "str": ("'hello world'", "'abcab'", "''", "'Paris'", "'level up'"),
    "int": ("3", "0", "12", "7", "100", "-4"),
    "float": ("0.5", "2.0", "1.25"),
    "bool": ("True", "False"),
    "": ("[1, 2, 3]", "'abc'", "4", "[2, 8, 5]"),
}
