"""Would a tree of drafts beat a chain? Guesses of real drafters, recorded, then replayed under lists of prices."""
