"""The route of Amazon SageMaker's containers, which takes the bodies of TGI and of the OpenAI API."""
