"""The HTTP gateway: OpenAI's API in front of the workers."""
