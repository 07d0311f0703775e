"""HTML pages read tag by tag."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """Tags with their attributes, and the text; fails where a tag does not close as it opened."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.words = [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):  # of tags that close themselves, too
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def policy(self) -> str:
        """The page's Content-Security-Policy."""
        return next(
            a["content"] for _, a in self.tags if a.get("http-equiv") == "Content-Security-Policy"
        )
