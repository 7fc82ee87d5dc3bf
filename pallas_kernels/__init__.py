"""Operations of the Kimi models, usable by anyone with arrays: one function each, several implementations behind it."""
