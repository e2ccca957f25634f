# LightningRL from this checkout: trainer and server, or a worker (compose.yaml). CPU by default; TORCH=cu128 for an NVIDIA GPU.
#   docker build -t lightningrl . && docker run --rm -v "$PWD:/work" lightningrl train my_recipe.toml
FROM python:3.12-slim-bookworm AS wheels
WORKDIR /source
COPY packages packages
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./packages/core ./packages/client ./packages/credit ./packages/server \
    ./packages/runs ./packages/viewer ./packages/traces ./packages/training ./packages/trainer-torch ./packages/adapter-langchain ./packages/adapter-openai-agents \
    ./packages/adapter-autogen

FROM python:3.12-slim-bookworm
ARG TORCH=cpu
ARG EXTRAS=torch,plot,postgres
COPY --from=wheels /wheels /wheels
# uv takes torch from PyTorch's own index, for the accelerator that TORCH names.
RUN pip install --no-cache-dir "uv>=0.9,<1" \
    && uv pip install --system --no-cache --torch-backend "${TORCH}" --find-links /wheels "lightningrl[${EXTRAS}]==0.1.0" \
    && useradd --create-home --uid 1000 lightning
USER 1000
WORKDIR /work
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["lightningrl"]
CMD ["--help"]
