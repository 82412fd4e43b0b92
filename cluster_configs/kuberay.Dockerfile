# The image of kuberay-raycluster.yaml, from this checkout: docker build -f cluster_configs/kuberay.Dockerfile -t REGISTRY/autohet .
# Ray's own image of the pinned version, and the pins of constraints.txt and constraints-cuda.txt (CUDA 13.0 wheels: driver 580.65 or newer on the nodes).
FROM rayproject/ray:2.60.0-py311
COPY --chown=ray:users . /opt/autohet
RUN pip install --no-cache-dir -c /opt/autohet/constraints-cuda.txt -c /opt/autohet/constraints.txt /opt/autohet
