"""What a row's tokens attend to: along a prefix tree or segments of one, and over ranks that divide the row."""
