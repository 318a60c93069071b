"""The ranks of a replica: how they meet, what they tell each other, and how they part."""
