"""What a whole answer rests on: hops behind what it wrote itself, units of text, and where it came from."""
