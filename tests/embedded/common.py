"""A source file to read."""

SOURCE = '''def add(a, b):
    """Add two numbers."""
    total = a + b
    return total
'''
