# The OpenAI frontend alone, for compose.yaml:
#   docker build -f docker/frontend.Dockerfile -t trtllm-pipeline-frontend:0.1.0 .
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md ./
COPY pipeline pipeline
COPY conf conf
COPY triton_repo triton_repo
RUN python -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir .

FROM python:3.12-slim
COPY --from=build /opt/venv /opt/venv
# No files of its own, no shell script: one program, as nobody.
USER 65534:65534
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["/opt/venv/bin/python", "-m", "pipeline"]
CMD ["frontend", "--help"]
