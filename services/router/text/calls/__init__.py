"""Tool calls in a reply's text: which format a model writes, and the parsers that find calls while the text grows."""
