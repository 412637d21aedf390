"""A short text for calibration before the first request: code and prose, like the text that callers send."""

TEXT = '''
def read_records(path, separator=","):
    """Read a file of records, one a line, and return them as a list of dictionaries.

    The first line names the fields. Lines that are empty are skipped. A line with more or fewer values than there
    are fields raises a ValueError that says which line it is.
    """
    with open(path, encoding="utf-8") as file:
        lines = [line.rstrip("\\n") for line in file]
    names = lines[0].split(separator)
    records = []
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        values = line.split(separator)
        if len(values) != len(names):
            raise ValueError(f"line {number} has {len(values)} values, expected {len(names)}")
        records.append(dict(zip(names, values)))
    return records


class Counter:
    """Counts how often each key was seen."""

    def __init__(self, keys=()):
        self._counts = {}
        for key in keys:
            self.add(key)

    def add(self, key, times=1):
        """Count a key once, or as many times as given."""
        if times < 0:
            raise ValueError("times must not be negative")
        self._counts[key] = self._counts.get(key, 0) + times

    def most_common(self, number=None):
        """Return the keys that were seen most often, with their counts, the most frequent first."""
        items = sorted(self._counts.items(), key=lambda item: item[1], reverse=True)
        if number is None:
            return items
        return items[:number]

    def total(self):
        """Return how many keys were counted in all."""
        return sum(self._counts.values())


The harbour lies on the north side of the bay, where the river has carried sand and stones for many centuries. In the
morning the boats go out with the tide, and in the evening they come back with what they have caught. Most of it is
sold on the same day. Whoever wants to see the market should come early, because the best places are taken by seven
o'clock and most of the fish is gone by nine. The old town hall is a short walk from the market. It was built in the
year after the great fire, and its tower can be seen from far away. From the top of the tower one sees the whole town,
the harbour and the islands beyond it.


def test_counter_counts():
    counter = Counter("abracadabra")
    assert counter.total() == 11
    assert counter.most_common(1) == [("a", 5)]


def test_counter_refuses_negative_times():
    counter = Counter()
    with raises(ValueError):
        counter.add("a", times=-1)
    assert counter.total() == 0
'''
