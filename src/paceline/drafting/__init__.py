"""How guesses are made: one module a method, behind `Drafter`."""
