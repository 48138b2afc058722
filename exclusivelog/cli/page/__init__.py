"""The page of `exclusivelog serve`: `content` reads the ledger, `server` answers a browser, and
page.html, page.css and page.js are what the browser shows."""
