#!/bin/sh
# The share of the repository's own tests that pass, whatever the agent did to its copy of them.
cp "$(dirname "$0")/repository/test_slugs.py" .
passed=0
for name in test_words test_one_dash; do
  python3 -m unittest -q "test_slugs.Slugs.$name" 1>&2 && passed=$((passed + 1))
done
echo "{\"reward\": 0.$((passed * 5))}" | sed 's/0\.10/1.0/'
