"""OpenAI's API over an Engine: schema, routes, limits, metrics, and the page that shows what was guessed."""
