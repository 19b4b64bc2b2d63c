"""What `sparroll calibrate` is made of: its options, what they ask for, and how the result is printed."""
