"""How one model runs, behind `Runner`: one module a kind."""
