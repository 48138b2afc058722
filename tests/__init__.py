"""The tests, a folder for each subject."""

import testing  # noqa: F401 - it sets the durability that the tests are run with
