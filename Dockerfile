# The server with the starter as its default pipeline.  Weights are fetched on the first start and
# stay in the volume.  Run with more shared memory than the default: --shm-size 1g.
FROM python:3.11-slim

ENV OMNISTAGE_HOME=/weights \
    OMP_WAIT_POLICY=passive \
    KMP_BLOCKTIME=0 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# The compiler builds the CPU kernels for the machine the container runs on, at the first start.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 omnistage \
    && install --directory --owner=omnistage --group=omnistage /weights

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY omnistage omnistage
RUN pip install --no-cache-dir -c constraints.txt setuptools \
    && pip install --no-cache-dir --no-build-isolation -c constraints.txt . \
    && rm -rf /app/*

USER omnistage
WORKDIR /home/omnistage
VOLUME /weights
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=180s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
CMD ["omnistage", "serve", "starter", "--host", "0.0.0.0", "--port", "8000"]
