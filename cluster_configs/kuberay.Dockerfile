# The image of kuberay-raycluster.yaml, from this checkout: docker build -f cluster_configs/kuberay.Dockerfile -t REGISTRY/autohet:0.2.0 .
# Ray's own image of the pinned version, and the versions and hashes of requirements.lock (CUDA 13.0 wheels: driver 580.65 or newer on the
# nodes). Tags move, digests do not: docker buildx imagetools inspect rayproject/ray:2.60.0-py311 prints the base's; then
# docker build --build-arg RAY_IMAGE=rayproject/ray@sha256:... builds on that very image.
ARG RAY_IMAGE=rayproject/ray:2.60.0-py311
FROM ${RAY_IMAGE}
COPY --chown=ray:users . /opt/autohet
RUN pip install --no-cache-dir --require-hashes -r /opt/autohet/cluster_configs/requirements.lock \
    && pip install --no-cache-dir --no-deps --no-build-isolation /opt/autohet
