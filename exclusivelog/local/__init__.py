"""The local backend: a log in a directory, which processes of one machine share."""
