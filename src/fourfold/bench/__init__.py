"""`fourfold bench`: a short run on random tokens, measured, with the plan's prediction beside it."""
