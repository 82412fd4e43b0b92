"""Chat templates: conversations as text, and the text that the assistant wrote in them."""
