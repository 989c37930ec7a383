"""The kinds of data sets of a suite, by what they hold. They are checked without torch."""
