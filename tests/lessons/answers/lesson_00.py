"""Right and wrong answers to the exercises of lesson 00, with the expected messages."""

RIGHT = {"half": [277.7 - 4 * (277.7 - 257.7)]}  # from the rounded peaks of the page

# Only near misses: the table of mistakes generates all other wrong answers.
WRONG = {"half": [(196.4, "too small")]}
