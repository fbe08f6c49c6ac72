"""Words from which task_makers.py composes its tasks. Plain data."""

LANGUAGES = (
    "French", "Spanish", "German", "Italian", "Portuguese", "Dutch", "English", "Polish", "Swedish", "Turkish",
)  # fmt: skip
TRANSLATION_REQUESTS = (
    "Translate to {language}: ", "Translate the following sentence into {language}:\n", "In {language}, please: ",
    "How do you say this in {language}?\n", "Translate the following text to {language}.\n\n",
    "Translate English to {language}: ", "Give the {language} translation of: ",
    "Translate into {language} and keep the tone:\n",
)  # fmt: skip
SENTENCE_OPENINGS = (
    "The", "We", "I", "My", "When", "In the morning", "Yesterday", "Please", "She", "They", "If", "Our", "There",
    "Last year", "It", "You", "This", "Few", "Many", "After the", "Because",
)  # fmt: skip
SENTENCES = (
    "The {adjective} {animal} walked across the {place} in the {season}.",
    "{person} bought {n} {thing} at the {place} and forgot to pay for one of them.",
    "Our {relative} has lived near the {place} for {n} years.",
    "We will meet at the {place} after the {event}, unless it rains.",
    "The {event} was moved to the {season} because the {place} was closed.",
    "{person} said that the {thing} were too {adjective} for the {event}.",
    "In the {season}, more than {n} people come to see the {adjective} {place}.",
    "Could you tell me how to get from the {place} to the station?",
    "The {relative} of {person} keeps a {adjective} {animal} in the garden.",
    "A report from the {place} says that {n} of the {thing} are missing.",
    "The guests of the {event} had not expected such {adjective} weather.",
    "I would like to order {n} {thing} and a cup of coffee, please.",
    "{person} was born in a small town close to the {place} and moved away at the age of {n}.",
    "Most visitors of the {place} do not know that it was built {n} years ago.",
    "The company announced that its {thing} will cost {n} dollars from next {season} on.",
    "It takes about {n} minutes to walk from here to the {place}.",
    "Before the {event} began, {person} counted the {thing} twice.",
    "Scientists found a {adjective} {animal} that had not been seen for {n} years.",
    "The new law will change how the {place} is paid for.",
    "If you are late for the {event}, call my {relative}.",
)
SENTENCE_WORDS = {
    "adjective": ("quiet", "old", "large", "strange", "beautiful", "tired", "heavy", "green", "cheap", "careful",
                  "cold", "famous", "broken", "simple", "young"),
    "animal": ("dog", "horse", "cat", "bird", "fox", "elephant", "rabbit", "whale", "bee", "goat", "turtle"),
    "place": ("river", "library", "market", "old bridge", "museum", "harbour", "school", "castle", "hospital",
              "city park", "theatre", "factory", "university", "train station", "town hall"),
    "season": ("spring", "summer", "autumn", "winter", "month of May", "week before Christmas"),
    "person": ("Maria", "Mr. Novak", "Aisha", "my neighbour", "Dr. Silva", "Peter", "the mayor", "Yuki", "Mrs. Brown",
               "the captain", "Omar", "Eva"),
    "relative": ("grandmother", "uncle", "sister", "cousin", "brother", "aunt", "father", "teacher"),
    "thing": ("books", "letters", "oranges", "tickets", "chairs", "lamps", "keys", "paintings", "bicycles", "cakes",
              "newspapers", "shoes"),
    "event": ("concert", "wedding", "meeting", "football match", "exam", "election", "festival", "funeral", "lecture"),
}  # fmt: skip

ENTITIES = {
    "country": ("France", "Brazil", "Japan", "Kenya", "Canada", "Egypt", "India", "Norway", "Peru", "Australia",
                "Italy", "Vietnam", "Mexico", "Turkey", "Poland", "Morocco", "Chile", "Greece", "Thailand", "Spain"),
    "science": ("photosynthesis", "gravity", "an atom", "evolution", "a black hole", "electricity", "DNA", "the moon",
                "a volcano", "the water cycle", "a virus", "inflation", "friction", "a rainbow", "the ozone layer",
                "magnetism", "plate tectonics", "an enzyme", "sound", "the speed of light"),
    "person": ("Albert Einstein", "Marie Curie", "Leonardo da Vinci", "Cleopatra", "Isaac Newton", "Mozart",
               "Nelson Mandela", "William Shakespeare", "Ada Lovelace", "Charles Darwin", "Frida Kahlo", "Gandhi",
               "Aristotle", "Jane Austen", "Galileo Galilei", "Abraham Lincoln"),
    "event": ("the French Revolution", "the First World War", "the moon landing", "the fall of the Berlin Wall",
              "the Industrial Revolution", "the Great Depression", "the Renaissance", "the Cold War",
              "the invention of printing", "the Roman Empire", "the discovery of penicillin"),
    "animal": ("a blue whale", "a honey bee", "a penguin", "an octopus", "a wolf", "a camel", "a bat", "a crocodile",
               "an ant", "a giraffe", "a salmon", "a parrot", "a spider", "a frog", "an owl"),
    "computing": ("a compiler", "a hash table", "recursion", "an operating system", "a database index", "encryption",
                  "a web browser", "machine learning", "a stack", "a firewall", "an API", "version control",
                  "a linked list", "object-oriented programming", "a regular expression"),
}  # fmt: skip
FACT_QUESTIONS = {
    "country": ("What is the capital of {}?", "Which languages are spoken in {}?", "What is {} known for?",
                "Which countries border {}?", "What is the climate of {} like?", "When did {} become independent?",
                "What should I see when I visit {}?"),
    "science": ("What is {}?", "How does {} work?", "Explain {} to a child.", "Why is {} important?",
                "What are three facts about {}?", "Who discovered {}?", "Give a short definition of {}."),
    "person": ("Who was {}?", "When was {} born?", "What is {} famous for?", "Where did {} live?",
               "What was the most important work of {}?", "Write a short biography of {}."),
    "event": ("When did {} happen?", "What were the causes of {}?", "What were the consequences of {}?",
              "Who played a part in {}?", "Describe {} in a few sentences."),
    "animal": ("What does {} eat?", "Where does {} live?", "How long does {} live?", "How big is {}?",
               "What is special about {}?", "How does {} protect itself?"),
    "computing": ("What is {}?", "How does {} work?", "When would I use {}?", "Explain {} with an example.",
                  "What are the advantages and disadvantages of {}?", "How do I learn about {}?"),
}  # fmt: skip
ANSWER_STYLES = ("", "", "", "", "Answer in one sentence. ", "Answer briefly: ", "Question: ", "Q: ")

RETRIEVAL_FRAMES = (
    "Answer the question using only the passage.\n\nPassage: {passages}\n\nQuestion: {question}",
    "Context:\n{passages}\n\nBased on the context above, answer this question: {question}",
    "Read the following and answer.\n\n{passages}\n\n{question}",
    "{passages}\n\nUsing the text above: {question}",
    "Here are some search results.\n\n{passages}\n\nUse them to answer: {question}",
)
PASSAGE_QUESTIONS = (
    "What", "What does", "Why", "How", "Who", "When", "Which", "How many", "Where", "What is the purpose of",
    "What is this text about?", "What is the most important point?", "What should a reader remember?",
    "Which of the statements are true?", "What happens first?",
)  # fmt: skip

EDIT_REQUESTS = (
    "Add type hints to this function:", "Add a docstring to this function:", "Rename the variables so that they are "
    "easier to read:", "Fix the bug in this function and return the whole function:", "Rewrite this function so that "
    "it is shorter:", "Add error handling to this code:", "Add a comment to every line of this code:",
    "Change this function so that it prints what it does:", "Refactor this code into smaller functions:",
    "Write the same function in JavaScript:", "Explain what this code does:", "Make this code faster:",
    "Write a unit test for this function:", "Rewrite this code without early returns:",
    "Return this code unchanged, but rename the function to `process`:",
)  # fmt: skip

FOLLOW_UPS = (
    "Why", "Can you", "Thanks! Now", "Give me an example", "And what about", "How", "What if", "Please explain",
    "Could you make it shorter", "Rewrite that", "Is that", "Which of these", "Now write", "Tell me more about",
    "Are you sure", "Summarize", "Translate that", "In other words,", "Make a list of",
)  # fmt: skip
CHAT_REQUESTS = (
    "Write a short poem about", "Give me five tips for", "Write an email about", "Explain the basics of",
    "Plan a weekend around", "Make a shopping list for", "Write a short story about", "List the pros and cons of",
    "Suggest a name for a shop about", "Compare two ways of", "Write a speech about", "Give me advice on",
    "Write a product description for", "Describe a typical day of someone who loves", "Write a dialogue about",
)  # fmt: skip
TOPICS = (
    "gardening", "learning to cook", "a healthy breakfast", "running a marathon", "saving money", "moving house",
    "teaching children to read", "renewable energy", "working from home", "photography", "camping in the rain",
    "job interviews", "chess", "sleep", "travelling by train", "adopting a dog", "public speaking", "time management",
    "playing the guitar", "climate change", "recycling", "writing a novel", "social media", "yoga", "first aid",
    "buying a used car", "making friends", "electric bicycles", "birdwatching", "baking bread", "space travel",
    "learning a language", "stress at work", "a small business", "ancient history", "making coffee",
)  # fmt: skip

LANGUAGE_OPENINGS = {
    "es": ("¿Qué es", "¿Cómo puedo", "¿Por qué", "Escribe un", "Explica", "¿Cuál es la capital de", "Dame tres",
           "Traduce al inglés:", "¿Quién fue", "Resume el siguiente texto:"),
    "fr": ("Qu'est-ce que", "Comment", "Pourquoi", "Écris un", "Explique", "Quelle est la capitale de", "Donne-moi",
           "Traduis en anglais :", "Qui était", "Résume le texte suivant :"),
    "de": ("Was ist", "Wie kann ich", "Warum", "Schreibe ein", "Erkläre", "Was ist die Hauptstadt von", "Nenne drei",
           "Übersetze ins Englische:", "Wer war", "Fasse den folgenden Text zusammen:"),
    "it": ("Che cos'è", "Come posso", "Perché", "Scrivi un", "Spiega", "Qual è la capitale di", "Chi era"),
    "pt": ("O que é", "Como posso", "Por que", "Escreva um", "Explique", "Qual é a capital de", "Quem foi"),
    "nl": ("Wat is", "Hoe kan ik", "Waarom", "Schrijf een", "Leg uit", "Wie was"),
    "pl": ("Co to jest", "Jak", "Dlaczego", "Napisz", "Kto był"),
    "sv": ("Vad är", "Hur", "Varför", "Skriv en", "Vem var"),
}  # fmt: skip
