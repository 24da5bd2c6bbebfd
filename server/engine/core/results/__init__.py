"""What a step's results do to its sequences, and the events that report them."""
