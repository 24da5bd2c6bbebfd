"""A client of a running service, for programs in Python: typed, synchronous or asynchronous.

It covers Tessera's own routes and chat. For the rest of the OpenAI and Anthropic APIs, their own clients work. The
package imports none of its modules, so that the command line can use some of them without an HTTP library.
"""
