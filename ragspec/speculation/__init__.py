"""How to guess tokens and how many: methods, drafters, costs, lengths, citations."""
