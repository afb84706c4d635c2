"""`ragspec train-draft`: a small draft of the target, taught by the target's own answers."""
