"""How draft tokens are made: one module a method, behind `Drafter`."""
