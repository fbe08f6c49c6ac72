"""OpenAI's API over an Engine: schema, routes, limits, metrics, and a web page that shows the draft tokens."""
